"""Let inductor's code call packing directly, without the dispatcher.

To a compiler, packing is an operator, whose results the partitioner saves. In inductor's code, a call through the
dispatcher and back to Python takes the host as long as a kernel launch, and a step of a small model waits for that. So
inductor lowers our operators as follows:

- ``quantize`` and ``dequantize`` call ``codec.packed.Quantize`` and ``Dequantize``, and ``quantize_checked`` calls
  ``codec.outliers.CheckedQuantize``. The code creates an object for each call, which knows its launch, and allocates
  the result. Where only pointwise kernels read the unpacked values, inductor unpacks inside of these
  (``compiled.fused``).
- The first packing of a forward also logs the decisions on its graph (``compiled.decision_log``), for code from a
  cache.

If this torch lacks one of the names used here, and in code that is not Python, the operators run as usual.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.formats import row_bytes
from lightning_actprune.codec.private import FOR_CALLS, refusal, virtualized
from lightning_actprune.codec.private import lowering as inductor
from lightning_actprune.compiled.decision_log import pop_pending_text
from lightning_actprune.compiled.fused import is_read_by_pointwise, may_be_fused, unpack_in_kernel
from lightning_actprune.compiled.graphs import VIEWS, first_input, name_of, value_of
from lightning_actprune.compiled.signs import lower_signs

_own = torch.ops.actprune


@functools.cache
def register_lowerings() -> None:
    """Register the lowerings of our operators for good, if this torch has all names that they use."""
    lowerings = inductor().lowerings  # first: this looks the names up
    if refusal("Calling without the dispatcher", FOR_CALLS) is None:
        lowerings[_own.quantize.default] = _quantize
        lowerings[_own.quantize_checked.default] = _quantize
        lowerings[_own.dequantize.default] = _dequantize
        lowerings[_own.pack.default] = _pack
        lowerings[_own.signs.default] = lower_signs


def _quantize(x: Any, block_size: int, bits: int, *operation: str) -> Any:
    """Quantize ``x``, and look for outliers if ``operation`` says which one saves it."""
    x = _realize(x)
    samples, rows, length = x.get_size()
    size = samples * rows * ceil_div(length, block_size), row_bytes(block_size, bits, 0)
    if not _in_python():
        operator = _own.quantize_checked if operation else _own.quantize
        return inductor().fallback_handler(operator.default)(x, block_size, bits, *operation)
    name = "CheckedQuantize" if operation else "Quantize"
    return _call(f"{name}{(block_size, bits, *operation)}", x, size, torch.uint8)


def _realize(x: Any) -> Any:
    """Return the first input of the current operator as a view of memory, with the strides of the graph.

    Without this, inductor would compute a view of a value apart from the value, which others read.
    """
    ir, node = inductor().ir, virtualized().graph.current_node.args[0]
    source, base = node, x.unwrap_view()
    while name_of(source) in VIEWS:
        source = first_input(source)
    if not ir.is_storage_and_layout(base) and list(base.get_size()) == list(value_of(source).shape):
        base.realize()
        ir.ExternKernel.require_exact_strides(ir.TensorBox(base), value_of(source).stride())
    return ir.ExternKernel.require_exact_strides(x, value_of(node).stride())


def _pack(*args: Any) -> Any:
    """Call the operator that drops blocks, after code that logs the decisions."""
    results = inductor().fallback_handler(_own.pack.default)(*args)
    text = pop_pending_text() if _in_python() and not virtualized().graph.is_backward else None
    if text is not None:
        (call,) = results[0].data.data.inputs
        write_call = call.codegen

        def codegen(wrapper: Any) -> None:
            _write_decisions(wrapper, text)
            write_call(wrapper)

        call.codegen = codegen
    return results


def _dequantize(values: Any, rows: Any, length: Any, block_size: int, bits: int, dtype: torch.dtype) -> Any:
    if not _in_python():
        handler = inductor().fallback_handler(_own.dequantize.default)
        return handler(values, rows, length, block_size, bits, dtype)
    if may_be_fused(length, block_size, bits) and is_read_by_pointwise(virtualized().graph.current_node):
        return unpack_in_kernel(values, rows, length, block_size, bits, dtype)
    return _call(f"Dequantize({block_size}, {bits}, {dtype})", values, (rows, length), dtype)


def _in_python() -> bool:
    """Return True if inductor writes Python code."""
    graph = virtualized().graph
    return not (graph.cpp_wrapper or getattr(graph, "fx_wrapper", False))


def _call(constructor: str, x: Any, size: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """Return the result of an object that is called with a tensor.

    Args:
        constructor: Source code that creates the object.
        x: The tensor, with the strides that the operator needs.
        size: Size of the result.
        dtype: Type of the result.
    """
    ir = inductor().ir
    x = ir.ExternKernel.realize_input(x)
    numbers = *x.get_size(), *x.get_stride(), *size
    symbols = {symbol for number in numbers for symbol in getattr(number, "free_symbols", ())}
    layout = ir.FixedLayout(x.get_device(), dtype, list(size), None)
    call = _call_class()(layout, [x], sorted(symbols, key=str))
    call.python_kernel_name = f"actprune_{call.get_name()}"
    # Code with the same text shares its objects, so the text has to tell what they are called with.
    call.constructor = f"{constructor}  # of {x.get_dtype()} {[*x.get_size()]} with strides {[*x.get_stride()]}"
    if not virtualized().graph.is_backward:
        call.decisions = pop_pending_text()
    return ir.TensorBox.create(call)


def _write_decisions(wrapper: Any, text: str) -> None:
    """Write code that logs the decisions on its graph."""
    wrapper.add_import_once("from lightning_actprune.compiled.decision_log import CachedDecisions")
    wrapper.add_import_once(f"actprune_decisions = CachedDecisions({text!r})")
    wrapper.writeline("actprune_decisions()")


@functools.cache
def _call_class() -> Any:
    """Return the class of calls; its base class exists only after inductor is imported."""
    base: Any = inductor().ir.ExternKernelOut

    class Call(base):  # type: ignore[misc]
        constructor = ""
        decisions: str | None = None

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and the constructor of its object at the top of the code."""
            if self.decisions is not None:
                _write_decisions(wrapper, self.decisions)
            wrapper.add_import_once("from lightning_actprune.codec.outliers import CheckedQuantize")
            wrapper.add_import_once("from lightning_actprune.codec.packed import Dequantize, Quantize")
            wrapper.add_import_once(f"{self.python_kernel_name} = {self.constructor}")
            super().codegen(wrapper)

    return Call
