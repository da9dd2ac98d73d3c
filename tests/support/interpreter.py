"""Triton's interpreter without what it does over and over again, which is a third of its time."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_faster() -> None:
    """Let it prepare the language once a launch, not for every call of a function in a kernel, and remember types.

    Does nothing where a release of Triton has other names.
    """
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)


def _remembered(numpy_of: Any) -> Any:
    of_scalar = functools.cache(numpy_of)

    def found(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return of_scalar(scalar) if type(scalar) is tl.dtype else numpy_of(dtype)

    return found


def _once_a_launch(patch: Any) -> Any:
    patched = set[frozenset[str]]()

    def patch_once(fn: Any) -> Any:
        modules = (value for value in fn.__globals__.values() if isinstance(value, type(tl)))
        languages = frozenset(value.__name__ for value in modules if value in (tl, tl.core))
        if languages in patched:
            return SimpleNamespace(restore=lambda: None)
        begins, scope = not patched, patch(fn)
        patched.add(languages)
        # What is prepared for a function in a kernel is not restored by the interpreter either.
        return SimpleNamespace(restore=lambda: (patched.clear(), scope.restore())) if begins else scope

    return patch_once
