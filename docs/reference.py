"""What the reference of the site needs to read our docstrings (``mkdocs.yml`` names it)."""

from typing import Any

import griffe


class DocstringSections(griffe.Extension):
    """Rename sections of docstrings to what griffe knows.

    ``Example:``, which Google's style has too, is ``Examples:``; as anything else its lists, such as ``[0.0, 0.5]``,
    would be links. The ``Args:`` of a named tuple are ``Attributes:``, since it has no constructor of its own.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the sections in the docstring of an object that was loaded."""
        if obj.docstring is None:
            return
        obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
            obj.docstring.value = obj.docstring.value.replace("\nArgs:\n", "\nAttributes:\n")
