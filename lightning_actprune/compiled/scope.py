"""Installing the pass over joint graphs, and taking it out again.

Inductor runs ``torch._inductor.config.joint_custom_post_pass`` on the joint graph of every region that it compiles,
behind its own patterns, which may make fused attention of several operations. For other backends of AOTAutograd there
is ``torch._functorch.config.joint_custom_pass``. That one is run before inductor's, too: there
it does nothing. A pass that somebody has installed before runs first, and is put back.

A graph without marks is left as it is, so whatever else is compiled meanwhile is not concerned. Inductor's caches know
a compilation by its graph, marks included, and by the pass's ``uuid``, the version and the source of this package. What
comes out of a cache is packed like when it went in, and says itself what was decided then (``compiled.told``).
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from typing_extensions import Self

from lightning_actprune.codec.private import FOR_JOINT_PASSES, inductor_runs, joint_passes, refusal
from lightning_actprune.compiled.calls import let_inductor_call
from lightning_actprune.compiled.joint import pack_joint_graph
from lightning_actprune.compiled.marks import left_marks
from lightning_actprune.compiled.report import Packed
from lightning_actprune.compiled.told import Rows, leave, listen, listening, settle, take_settled

_FEATURE = "Packing what compiled layers keep"


def why_not() -> str | None:
    """Return why this torch cannot pack what compiled layers keep, ``None`` if it can."""
    joint_passes()
    return refusal(_FEATURE, FOR_JOINT_PASSES)


class CompiledPacking:
    """Packs what marked layers keep in the graphs that are compiled while it is open.

    As a context manager it is open inside. Several may be open, in whatever order they are closed. One that nobody
    holds any more is closed.

    Raises:
        RuntimeError: If this torch has no passes over joint graphs; ``why_not`` says so before.

    Example:
        >>> with CompiledPacking() as packing:  # doctest: +SKIP
        ...     torch.compile(model)(x).sum().backward()
        >>> sum(row.stored_bytes for row in packing.rows)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.rows = Rows()
        """What was decided of every value of the graphs that were compiled, or came out of a cache and have run."""
        self._left = 0
        self._closing: weakref.finalize[..., CompiledPacking] | None = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it packs."""
        return self._closing is not None and self._closing.alive

    @property
    def was_missed(self) -> bool:
        """Whether marks were left in code that ran since it was opened, and no graph was packed.

        So it is with compilers that run no pass over the joint graph of forward and backward. With others than inductor
        marks stay in graphs that have no backward, where they cost a copy.
        """
        return left_marks() > self._left and not self.rows.passed

    def open(self) -> Self:
        """Pack from now on. Does nothing if it is open."""
        reason = why_not()
        if reason is not None:
            raise RuntimeError(reason)
        if not listening():
            _installed.append(_Installed())
        if not self.is_open:
            self._left = left_marks()
            listen(self.rows)
            self._closing = weakref.finalize(self, _close, self.rows)
        return self

    def close(self) -> None:
        """Pack no longer, and put back what was there before the first was opened. Does nothing if it is closed."""
        if self._closing is not None:
            self._closing()


def _close(rows: Rows) -> None:
    leave(rows)
    if not listening():
        _installed.pop().remove()


_installed: list[_Installed] = []
"""The passes, while any is open."""


class _Installed:
    """The passes, and those that were there before."""

    def __init__(self) -> None:
        self.removed = False
        self._last: Packed | None = None
        places, made = joint_passes(), _inductor_pass()
        self._passes: list[tuple[Any, str, Any]] = []
        for config, name, kind, run in (
            (places.inductor, "joint_custom_post_pass", made, self._pack),
            (places.inductor, "post_grad_custom_pre_pass", made, self._settle),
            (places.functorch, "joint_custom_pass", _FunctorchPass, self._pack),
        ):
            self._passes.append((config, name, kind(self, run, getattr(config, name))))
            setattr(config, *self._passes[-1][1:])

    def remove(self) -> None:
        """Put back those that were there before, unless others have been installed meanwhile."""
        self.removed = True
        for config, name, own in self._passes:
            if getattr(config, name) is own:
                setattr(config, name, _remaining(own))

    def _pack(self, graph: Graph) -> None:
        """Pack what a joint graph keeps, and say so to all that are open."""
        self._last = None
        take_settled()  # of an earlier graph, whose code has no call that could say it
        if not listening():  # somebody has wrapped the pass, and keeps it
            return
        try:
            packed = pack_joint_graph(graph)
        except Exception as error:
            raise RuntimeError(
                f"{_FEATURE} failed for one of the compiler's graphs, with the error above. HINT: this is a bug in "
                "lightning_actprune, please report it; until it is mended, leave the module out of what is compiled "
                "(`torch.compiler.disable`), or leave it dense by a rule of `None`."
            ) from error
        if packed is not None:
            if inductor_runs():
                let_inductor_call()
            self._last = packed
            for rows in listening():
                rows.packed(packed.rows)

    def _settle(self, graph: Graph) -> None:
        """Correct what was said of the last joint graph by what its forward saves, if this is that."""
        if self._last is None:
            return
        rows = self._last.settled(graph)
        if rows is not None:
            self._last = None
            settle(rows)


def _remaining(installed: Any) -> Any:
    """Return a pass, or what was there before it if it is removed."""
    while isinstance(getattr(installed, "owner", None), _Installed) and installed.owner.removed:
        installed = installed.before
    return installed


@functools.cache
def _inductor_pass() -> Any:
    """Return the class of inductor's pass, whose base is there once inductor is imported."""
    base: Any = joint_passes().base

    class InductorPass(base):  # type: ignore[misc]
        def __init__(self, owner: _Installed, run: Callable[[Graph], None], before: Any) -> None:
            self.owner, self.before, self._run = owner, before, run
            # Newer versions of torch take several.
            self._others = before if isinstance(before, list | tuple) else [] if before is None else [before]

        def __deepcopy__(self, memo: Any) -> Any:
            return self  # torch.compile copies all of the configuration

        def __call__(self, graph: Graph) -> None:
            for other in self._others:
                other(graph)
            self._run(graph)

        def uuid(self) -> Any:
            others = [other.uuid() if isinstance(other, base) else None for other in self._others]
            return (source_hash(), *others) if all(others) else None

    return InductorPass


class _FunctorchPass:
    def __init__(self, owner: _Installed, run: Callable[[Graph], None], before: Any) -> None:
        self.owner, self.before, self._run = owner, before, run

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __call__(self, module: GraphModule, inputs: Any) -> GraphModule:
        if callable(self.before):
            module = self.before(module, inputs)
        if not inductor_runs():
            self._run(module.graph)
            module.recompile()
        return module


@functools.cache
def source_hash() -> bytes:
    """Return a number of what the pass does: of the package's version, the files here and what compiled code calls.

    Code that comes out of a cache on disk calls what there was when it went in.
    """
    from lightning_actprune import __version__

    digest, here = hashlib.sha256(f"{__version__} {torch.__version__}".encode()), Path(__file__).parent
    codec = here.parent / "codec"
    for path in (*sorted(here.glob("*.py")), *(codec / f"{name}.py" for name in ("packed", "formats", "saved_ops"))):
        digest.update(path.read_bytes())
    return digest.digest()
