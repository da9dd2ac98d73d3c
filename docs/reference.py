"""What the reference of the site needs to read our docstrings (``mkdocs.yml`` names it)."""

import re
from typing import Any

import griffe


class DocstringSections(griffe.Extension):
    """Rename sections of docstrings to what griffe knows, and leave out code that would be shown as a value.

    ``Example:``, which Google's style has too, is ``Examples:``; as anything else its lists, such as ``[0.0, 0.5]``,
    would be links. The ``Args:`` of a named tuple are ``Attributes:``, since it has no constructor of its own.
    ``.. note::``, which Lightning's own docstrings have, is ``Note:``. What a constructor computes for an attribute of
    ``self`` says nothing outside of it.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change an object that was loaded."""
        if isinstance(obj, griffe.Attribute) and "instance-attribute" in obj.labels:
            obj.value = None
        if obj.docstring is None:
            return
        obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        obj.docstring.value = re.sub(r"^\.\. note:: ", "Note:\n    ", obj.docstring.value, flags=re.MULTILINE)
        if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
            obj.docstring.value = obj.docstring.value.replace("\nArgs:\n", "\nAttributes:\n")
