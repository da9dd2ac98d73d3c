"""Code in the pages of the documentation, and running it."""

import re


def code_blocks(page, language):
    """Return the blocks of ``language`` in the text of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def run_blocks(blocks, name, namespace=None):
    """Execute the blocks of the page ``name`` in order in one namespace and return it."""
    namespace = {"__name__": name} if namespace is None else namespace
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    return namespace
