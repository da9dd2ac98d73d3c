"""What inductor's code calls to pack, in place of operators.

To a compiler, packing is an operator: what it returns is what the partitioner saves. In the code that inductor writes
it need not be one. The way through the dispatcher and back to Python takes the host as long as the launch of a kernel,
and a step of a small model waits for that. So where inductor lowers ``quantize`` and ``dequantize``, its code calls
objects (``codec.packed.Quantize``, ``Dequantize``) that it makes when it is loaded and that know how to launch, or
takes apart what is packed inside of its own kernels (``compiled.fused``).

The first of them in a forward also says what was decided of the graph (``compiled.told``), which code out of a cache
tells nobody otherwise.

In a torch that lacks one of the names this rests on, and in code that is not Python's, operators are called as before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.formats import row_bytes
from lightning_actprune.codec.private import FOR_CALLS, refusal, virtualized
from lightning_actprune.codec.private import lowering as inductor
from lightning_actprune.compiled.fused import is_read_by_pointwise, may_be_fused, unpacked
from lightning_actprune.compiled.signs import lower_signs
from lightning_actprune.compiled.told import take_settled

_own = torch.ops.actprune


@functools.cache
def let_inductor_call() -> None:
    """Let inductor write what packs, unpacks and tells as above from now on, if this torch can."""
    lowerings = inductor().lowerings  # first, since looking names up finds out which are missing
    if refusal("Calling without the dispatcher", FOR_CALLS) is None:
        lowerings[_own.quantize.default] = _quantize
        lowerings[_own.dequantize.default] = _dequantize
        lowerings[_own.pack.default] = _pack
        lowerings[_own.signs.default] = lower_signs


def _quantize(x: Any, block_size: int, bits: int) -> Any:
    samples, rows, length = x.get_size()
    size = samples * rows * ceil_div(length, block_size), row_bytes(block_size, bits, 0)
    if not _in_python():
        return inductor().fallback_handler(_own.quantize.default)(x, block_size, bits)
    return _called(f"Quantize({block_size}, {bits})", x, (), size, torch.uint8)


def _pack(*args: Any) -> Any:
    """Call the operator that drops blocks, and have it tell as others do."""
    results = inductor().fallback_handler(_own.pack.default)(*args)
    report = take_settled() if _in_python() and not virtualized().graph.is_backward else None
    if report is not None:
        (call,) = results[0].data.data.inputs
        written = call.codegen

        def codegen(wrapper: Any) -> None:
            _write_report(wrapper, report)
            written(wrapper)

        call.codegen = codegen
    return results


def _dequantize(values: Any, rows: Any, length: Any, block_size: int, bits: int, dtype: torch.dtype) -> Any:
    if not _in_python():
        handler = inductor().fallback_handler(_own.dequantize.default)
        return handler(values, rows, length, block_size, bits, dtype)
    if may_be_fused(length, block_size, bits) and is_read_by_pointwise(virtualized().graph.current_node):
        return unpacked(values, rows, length, block_size, bits, dtype)
    return _called(f"Dequantize({block_size}, {bits}, {dtype})", values, (rows, length), (rows, length), dtype)


def _in_python() -> bool:
    """Return whether inductor writes code in Python."""
    graph = virtualized().graph
    return not (graph.cpp_wrapper or getattr(graph, "fx_wrapper", False))


def _called(made: str, x: Any, numbers: tuple[Any, ...], size: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """Return what an object returns for a tensor and numbers.

    Args:
        made: How the object is made.
        x: The tensor, whose strides are those that the operator asks for.
        numbers: What it is given besides.
        size: Of the result.
        dtype: Of the result.
    """
    ir = inductor().ir
    layout = ir.FixedLayout(x.get_device(), dtype, list(size), None)
    call = _call_class()(layout, [ir.ExternKernel.realize_input(x)], numbers, python_kernel_name=_name(made))
    call.made = made
    if not virtualized().graph.is_backward:
        call.report = take_settled()
    return ir.TensorBox.create(call)


def _write_report(wrapper: Any, report: str) -> None:
    """Let the code say what was decided of it."""
    wrapper.add_import_once("from lightning_actprune.compiled.told import Report")
    wrapper.add_import_once(f"actprune_report = Report({report!r})")
    wrapper.writeline("actprune_report()")


def _name(made: str) -> str:
    """Return the name of an object in the code: ``actprune_Quantize_32_4``."""
    return "actprune_" + "_".join(made.replace("(", ", ").rstrip(")").replace("torch.", "").split(", "))


@functools.cache
def _call_class() -> Any:
    """Return the class of calls, whose base is there once inductor is imported."""
    base: Any = inductor().ir.ExternKernelAlloc

    class Call(base):  # type: ignore[misc]
        made = ""
        report: str | None = None

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and what it calls above all code."""
            if self.report is not None:
                _write_report(wrapper, self.report)
            wrapper.add_import_once("from lightning_actprune.codec.packed import Dequantize, Quantize")
            wrapper.add_import_once(f"{_name(self.made)} = {self.made}")
            super().codegen(wrapper)

    return Call
