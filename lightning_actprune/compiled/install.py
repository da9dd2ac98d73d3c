"""Install the pass over joint graphs in the compiler's configuration, and remove it.

- Inductor runs ``torch._inductor.config.joint_custom_post_pass`` on the joint graph of each compiled region, after its
  own patterns, which may turn several operations into fused attention.
- Other backends of AOTAutograd run ``torch._functorch.config.joint_custom_pass``. Inductor runs it, too, before its
  patterns; there the pass does nothing.

A pass of the user's that is installed already runs first, and is put back at the end.

A graph without marks stays as it is, so other code that is compiled meanwhile is not affected. The keys of inductor's
caches contain the graph with its marks, and the pass's ``uuid``: version and source of this package. Cached code packs
as it did when it was compiled, and logs its decisions itself (``compiled.decision_log``).
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
from lightning_actprune.compiled.backward import write_backward
from lightning_actprune.compiled.decision_log import (
    DecisionLog,
    PackedGraph,
    close_log,
    open_log,
    open_logs,
    pop_pending_text,
    settle_logs,
)
from lightning_actprune.compiled.inductor_lowering import register_lowerings
from lightning_actprune.compiled.joint_pass import pack_joint_graph
from lightning_actprune.compiled.marks import count_run_marks

_FEATURE = "Packing what compiled layers keep"


def why_not() -> str | None:
    """Return the reason if this torch cannot pack what compiled layers keep, else ``None``."""
    joint_passes()
    return refusal(_FEATURE, FOR_JOINT_PASSES)


class CompiledPacking:
    """Pack what marked layers keep for backward, in all graphs that are compiled while this is open.

    It is a context manager. Several may be open and close in any order. One without references is closed.

    Raises:
        RuntimeError: If this torch has no passes over joint graphs; ``why_not`` says so before.

    Example:
        >>> with CompiledPacking() as packing:  # doctest: +SKIP
        ...     torch.compile(model)(x).sum().backward()
        >>> sum(row.stored_bytes for row in packing.rows)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.rows = DecisionLog()
        """The decisions on all graphs that were compiled, or that ran from a cache, while it was open."""
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
        """Whether compiled code with marks ran since it was opened, and no graph was packed.

        Compilers without a pass over joint graphs leave the marks in. All but inductor leave them in graphs without
        backward, too, where a mark costs a copy.
        """
        return count_run_marks() > self._left and not self.rows.has_packed

    def open(self) -> Self:
        """Pack from now on. Does nothing if it is open."""
        reason = why_not()
        if reason is not None:
            raise RuntimeError(reason)
        if not open_logs():
            _installed.append(_Installed())
        if not self.is_open:
            self._left = count_run_marks()
            open_log(self.rows)
            self._closing = weakref.finalize(self, _close, self.rows)
        return self

    def close(self) -> None:
        """Pack no longer; the last one to close puts the user's passes back. Does nothing if it is closed."""
        if self._closing is not None:
            self._closing()


def _close(log: DecisionLog) -> None:
    close_log(log)
    if not open_logs():
        _installed.pop().remove()


_installed: list[_Installed] = []
"""The installed passes, while any ``CompiledPacking`` is open."""


class _Installed:
    """Our passes in the configuration, and the user's that they replace."""

    def __init__(self) -> None:
        self.removed = False
        self._last: PackedGraph | None = None
        places, inductor_pass = joint_passes(), _inductor_pass()
        self._passes: list[tuple[Any, str, Any]] = []
        for config, name, kind, run in (
            (places.inductor, "joint_custom_post_pass", inductor_pass, self._pack),
            (places.inductor, "post_grad_custom_pre_pass", inductor_pass, self._finish),
            (places.functorch, "joint_custom_pass", _FunctorchPass, self._pack),
        ):
            self._passes.append((config, name, kind(self, run, getattr(config, name))))
            setattr(config, *self._passes[-1][1:])

    def remove(self) -> None:
        """Put the user's passes back, unless others have been installed meanwhile."""
        self.removed = True
        for config, name, own in self._passes:
            if getattr(config, name) is own:
                setattr(config, name, _installed_before(own))

    def _pack(self, graph: Graph) -> None:
        """Pack the values of a joint graph, and log the decisions."""
        self._last = None
        pop_pending_text()  # of an earlier graph whose code calls nothing that could carry it
        if not open_logs():  # the user has wrapped the pass, and still runs it
            return
        try:
            packed = pack_joint_graph(graph)
        except Exception as error:
            raise RuntimeError(
                f"{_FEATURE} failed for one of the compiler's graphs, with the error above. HINT: this is a bug in "
                "lightning_actprune, please report it. As a workaround, exclude the module with "
                "`torch.compiler.disable`, or keep it dense by a rule of `None`."
            ) from error
        if packed is not None:
            if inductor_runs():
                register_lowerings()
            self._last = packed
            for log in open_logs():
                log.add_graph(packed.rows)

    def _finish(self, graph: Graph) -> None:
        """Write a graph of backward anew, or settle the decisions on the last joint graph by its forward."""
        write_backward(graph)
        if self._last is None:
            return
        rows = self._last.settle(graph)
        if rows is not None:
            self._last = None
            settle_logs(rows)


def _installed_before(graph_pass: Any) -> Any:
    """Return the first pass that is not removed, from ``graph_pass`` back to those that were installed before it."""
    while isinstance(getattr(graph_pass, "owner", None), _Installed) and graph_pass.owner.removed:
        graph_pass = graph_pass.before
    return graph_pass


@functools.cache
def _inductor_pass() -> Any:
    """Return the class of inductor's passes; its base class exists only after inductor is imported."""
    base: Any = joint_passes().base

    class InductorPass(base):  # type: ignore[misc]
        def __init__(self, owner: _Installed, run: Callable[[Graph], None], before: Any) -> None:
            self.owner, self.before, self._run = owner, before, run
            # The newest versions of torch accept a list of passes.
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


_IN_COMPILED_CODE = "packed", "formats", "host_copy", "layout", "outliers", "saved_ops"
"""Modules of ``codec`` that decide or compute something in compiled code."""


@functools.cache
def source_hash() -> bytes:
    """Return a hash of the versions and of the source that compiled code depends on.

    Code from a cache on disk calls functions as they were when it was compiled.
    """
    from lightning_actprune import __version__

    digest, folder = hashlib.sha256(f"{__version__} {torch.__version__}".encode()), Path(__file__).parent
    codec = folder.parent / "codec"
    for path in (*sorted(folder.glob("*.py")), *(codec / f"{name}.py" for name in _IN_COMPILED_CODE)):
        digest.update(path.read_bytes())
    return digest.digest()
