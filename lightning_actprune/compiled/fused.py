"""Unpack values inside the kernels that read them.

A pointwise reader of an unpacked value, such as the backward of an activation function, need not load it from memory:
inductor's code computes it from the packed bytes, in the format of ``codec.formats``. For large tensors, tiles consist
of whole blocks, so a thread loads and computes header, hash and words of codes once for its eight values, and few
instructions remain for each value. A value follows from ``z``, to which its code q adds bits::

    z = 2^v + q + 1 - u_e
    x_e = (base + scale/2) + scale (z - 2^v - 1)

where difference and product are exact, so the sum is rounded once, with or without a fused multiply-add.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from lightning_actprune.codec import formats
from lightning_actprune.codec.private import lowering as inductor
from lightning_actprune.codec.private import operations
from lightning_actprune.codec.saved_ops import Kind, backward_of, ops_of
from lightning_actprune.compiled.backward import WRITTEN
from lightning_actprune.compiled.graphs import VIEWS, is_read_by_product, name_of

_WORD_BITS = 32
_AFTER_DITHER = 4
"""Bits of an fp32 number behind those of code and dither; the first of them is the half."""
_GROUP_BITS = 16
"""Codes are shifted twice: by groups of this many bits, equal for all values of a thread, then within a group."""
_POINTWISE = ops_of(Kind.POINTWISE | Kind.CAST) | backward_of(Kind.POINTWISE) | WRITTEN


def is_read_by_pointwise(node: Node) -> bool:
    """Return True if all readers of a value are pointwise, up to values that a product reads from memory."""
    waiting, seen = [node], set[Node]()
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if name_of(user) in VIEWS or (name_of(user) in _POINTWISE and not is_read_by_product(user)):
                waiting.append(user)
            elif name_of(user) not in _POINTWISE:
                return False
    return True


def may_be_fused(length: Any, block_size: int, bits: int) -> bool:
    """Return True if rows consist of whole blocks, and blocks, a power of two in size, of whole words."""
    whole = block_size & (block_size - 1) == 0 and block_size * min(formats.PLANES[bits]) % _WORD_BITS == 0
    return whole and isinstance(length, int) and length % block_size == 0


def unpack_in_kernel(values: Any, rows: Any, length: Any, block_size: int, bits: int, dtype: torch.dtype) -> Any:
    """Return ``dequantize(values, rows, length, block_size, bits, dtype)`` as an expression inside kernels."""
    stored = _Stored(values, rows * length // block_size, block_size, bits)

    def value(index: Sequence[Any]) -> Any:
        row, column = index
        return stored.value(row * length + column)

    return inductor().ir.Pointwise.create(
        device=values.get_device(), dtype=dtype, inner_fn=value, ranges=[rows, length]
    )


class _Stored:
    """Packed blocks.

    Args:
        values: Their bytes.
        count: Their number.
        block_size: Values per block.
        bits: Bits of a code.
    """

    def __init__(self, values: Any, count: Any, block_size: int, bits: int) -> None:
        self._block_size, self._bits = block_size, bits
        size = count * formats.row_bytes(block_size, bits, 0)
        flat = inductor().lowerings[torch.ops.aten.view.default](values, [size])
        self._planes, start = [], 0
        for plane in formats.PLANES[bits]:
            end = start + count * formats.plane_bytes(block_size, plane)
            self._planes.append(_view(flat, start, end, torch.int32))
            start = end
        self._headers = _view(flat, start, size, torch.int16)

    def value(self, at: Any) -> Any:
        """Return the value with the number ``at``."""
        ops = operations()
        block = inductor().quotient(at, self._block_size)
        e = _index(at) & _number(self._block_size - 1)  # not a remainder: the compiler knows the lowest bits
        header = ops.to_dtype(self._headers([block]), torch.int32) & _number(0xFFFF)
        z = self._rest(header, block) ^ self._reverse_bits(e)
        place = 23 - self._bits
        for plane, load in zip(formats.PLANES[self._bits], self._planes, strict=True):
            word = load([inductor().quotient(at, _WORD_BITS // plane)])
            z = z | self._code(word, e, plane, place)
            place += plane
        z = ops.to_dtype_bitcast(z, torch.float32, torch.int32) - _real(2.0**self._bits + 1)
        scale = self._scale(header)
        return self._middle(header, scale) + scale * z

    def _rest(self, header: Any, block: Any) -> Any:
        """Return the bits of ``2^v + 1 - u`` of a block's first value."""
        h = _left(header, 16) + _index(block) * _number(formats.SIGNED_PLACE)
        a, first, b, second = formats.MIX
        h = (h ^ _right(h, a)) * _number(first)
        h = (h ^ _right(h, b)) * _number(second - 2**32)
        dither = formats.DITHER_BITS - self._bits
        rest = _right(h, 32 - dither) ^ _number(2**dither - 1)
        return _left(rest, _AFTER_DITHER) | _number((127 + self._bits << 23) + 2 ** (_AFTER_DITHER - 1))

    def _reverse_bits(self, e: Any) -> Any:
        """Return the bits of a place in reverse order, the lowest one at the highest bit of the hash."""
        reverse, highest = _number(0), 22 - self._bits
        for bit in range(min((self._block_size - 1).bit_length(), formats.DITHER_BITS - self._bits)):
            by, alone = highest - 2 * bit, e & _number(1 << bit)
            reverse = reverse | (_left(alone, by) if by >= 0 else _right(alone, -by))
        return reverse

    def _code(self, word: Any, e: Any, plane: int, place: int) -> Any:
        """Return the part of a value's code that a word of a plane has, as bits from ``place`` on."""
        ops, group = operations(), _GROUP_BITS // plane
        by = _left(_right(e, _log(group)) & _number(1), _log(_GROUP_BITS))
        word = ops.bitwise_right_shift(word, by)
        word = ops.bitwise_left_shift(word, _number(place) - _left(e & _number(group - 1), _log(plane)))
        return word & _number(2**plane - 1 << place)

    def _scale(self, header: Any) -> Any:
        ops, code = operations(), header & _number(511)
        scale = _left(code + _number(formats.SCALE_CODES), 20)
        scale = ops.where(ops.eq(code, _number(formats.LOST)), _number(0x7FC00000), scale)
        scale = ops.where(ops.eq(code, _number(0)), _number(0), scale)
        return ops.to_dtype_bitcast(scale, torch.float32, torch.int32)

    def _middle(self, header: Any, scale: Any) -> Any:
        offset = (_right(header, 9) ^ _number(64)) - _number(64)
        steps = offset * _number(2**self._bits - 1) + _number(formats.STEPS // 2)
        return scale * (operations().to_dtype(steps, torch.float32) * _real(1 / formats.STEPS))


def _view(values: Any, start: Any, end: Any, dtype: torch.dtype) -> Callable[[Sequence[Any]], Any]:
    """Return a function that loads numbers of type ``dtype`` from the bytes ``start`` to ``end``.

    A view starts with the first number: if the index had to add one, inductor would not see that a kernel's loops are
    one loop, and the backward of a GELU takes twice as long (H200).
    """
    ir, count = inductor().ir, (end - start) // dtype.itemsize
    values = inductor().lowerings[torch.ops.aten.slice.Tensor](values, 0, start, end)
    layout, inputs = ir.FixedLayout(values.get_device(), dtype, [count]), [ir.ExternKernel.realize_input(values)]
    view = _view_class()(layout, torch.ops.aten.view.dtype, inputs, [dtype], lambda x, dtype: ((*x, *dtype), {}))
    load: Callable[[Sequence[Any]], Any] = ir.TensorBox.create(view).make_loader()
    return load


@functools.cache
def _view_class() -> Any:
    """Return the class of views of bytes, whose memory inductor knows to be that of its input."""
    base: Any = inductor().ir.FallbackKernel

    class View(base):  # type: ignore[misc]
        def codegen(self, wrapper: Any) -> None:
            """Write the view without the dispatcher, and without an assertion about it."""
            wrapper.writeline(f"{self.get_name()} = {self.inputs[0].codegen_reference()}.view({self.get_dtype()})")

    return View


def _index(index: Any) -> Any:
    """Return an index as a number of 32 bits.

    The bitwise operation keeps inductor from merging it into another index, which it would compute in 64 bits.
    """
    ops = operations()
    return ops.to_dtype(ops.index_expr(index, torch.int32) & _number(2**31 - 1), torch.int32)


def _number(value: int) -> Any:
    return operations().constant(value, torch.int32)


def _real(value: float) -> Any:
    return operations().constant(value, torch.float32)


def _left(x: Any, by: int) -> Any:
    return operations().bitwise_left_shift(x, _number(by))


def _right(x: Any, by: int) -> Any:
    """Return ``x`` shifted to the right, with zeros from the left."""
    return operations().bitwise_right_shift(x, _number(by)) & _number(2 ** (32 - by) - 1)


def _log(power: int) -> int:
    return power.bit_length() - 1
