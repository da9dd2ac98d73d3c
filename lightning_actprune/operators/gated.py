r"""Gated products ``z = f(a) u`` (SwiGLU, GeGLU and similar) that store the factors of their gradients quantized.

Backward is linear in two numbers per value, and needs nothing else::

    da = q g,  q = u f'(a)        du = p g,  p = f(a)

torch saves ``a``, ``f(a)`` and ``u``. Here p and q are saved, in blocks with a scale each like the input of a layer
(``codec.formats``), and never ``a``, ``u`` or ``z``. Their random errors have mean zero, so both gradients are
unbiased. Storing ``a`` and ``u`` in as many bits would be no better: the error of p would be a fifth larger and biased,
and backward would compute f and f' again.

Root mean square errors of p and q, relative to their own, for SiLU of 2^20 normal ``a`` and ``u`` in blocks of 32; in
brackets those of p and q from quantized ``a`` and ``u``, and the bias of that p:

======  ============  ===========================
8 bits  0.4 %, 0.6 %  (0.5 %, 0.6 %, bias 0.001 %)
4 bits  7.6 %, 10 %   (9.1 %, 10 %, bias 0.2 %)
3 bits  16 %, 22 %    (19 %, 22 %, bias 1.0 %)
2 bits  38 %, 52 %    (45 %, 51 %, bias 5.4 %)
======  ============  ===========================

Rows ``[R, L]`` are cut into ``N = R ceil(L / b)`` blocks, numbered row by row. The blocks of q come first, then those
of p, as one tensor ``[2 R, L]`` of which all blocks are stored. A factor whose gradient is not needed is left out. A
block with NaN or Inf is read as NaN. ``z`` is computed in fp32 and rounded once.

Forward is exact, and saves only the bytes of q and p. ``a`` and ``u`` are two tensors, or the halves of one along a
dimension, as a joint projection returns them. Halves are read in place, and their gradient is one tensor too.

The modules are MLPs whose hidden values are ``f(a) u``, and ``nn.GLU``. Linear layers, norms and dropout inside are
called as before, with their hooks, and may be converted themselves. The activation function is computed with the
product: if a gradient is needed, its module is not called, and hooks on it do not run. In no-grad mode a module behaves
exactly as the dense one. The product is torch's if no input of it needs a gradient, or if the activation function was
replaced by an unknown one. MLPs of other packages (timm, transformers) are recognised without importing anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import (
    LaunchCache,
    TensorKey,
    choose_backend,
    in_plain_eager_mode,
    make_apply,
    may_compress,
    no_view,
    on_device_of,
    once_differentiable,
)
from lightning_actprune.codec.formats import row_bytes
from lightning_actprune.codec.layout import inverse_order, memory_order
from lightning_actprune.codec.packed import check_storable, pack_all, unpack_all
from lightning_actprune.codec.private import is_exporting
from lightning_actprune.config import check_block_size
from lightning_actprune.operators.activation import (
    ACTIVATIONS,
    SMOOTH,
    StoredDerivative,
    activated_dtype,
    activation_class,
    check_input,
    check_stored,
    keeps_derivative,
)
from lightning_actprune.operators.base import CompressedLayer, LayerState, Traced

if TYPE_CHECKING:
    from lightning_actprune.kernels.launch import Launch

SEPARATE, GATE_FIRST, GATE_LAST = range(3)
"""Layout of gate and factor, and of their gradients: two tensors, or the halves of one."""


# === Stored factors ===================================================================================================


class StoredFactors(NamedTuple):
    """How the factors of the gradients are stored.

    Args:
        bits: Bits of a value.
        block_size: Values per block, in [1, max(L, 1)].
        for_a: True if q is stored, for the gradient of ``a``.
        for_u: True if p is stored, for the gradient of ``u``.
    """

    bits: int
    block_size: int
    for_a: bool
    for_u: bool

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return the number of blocks and the bytes of each."""
        blocks = rows * ceil_div(length, self.block_size) * (self.for_a + self.for_u)
        return blocks, row_bytes(self.block_size, self.bits, 0)


# === Autograd =========================================================================================================


class GatedFunction(torch.autograd.Function):
    """Autograd function of a gated product that saves the factors of its gradients quantized."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        u: Tensor | None,
        layout: int,
        dim: int,
        function: StoredDerivative,
        block_size: int,
        dtype: torch.dtype,
        eager: bool,
    ) -> Tensor:
        """Return the exact product; without ``u``, of the halves of ``a`` along ``dim``."""
        rows_a, rows_u, shape = _rows(a, u, layout, dim)  # [R, L] each
        block = max(1, min(block_size, rows_a.shape[1]))
        for_a, for_u = ctx.needs_input_grad[:2]
        stored = StoredFactors(function.bits, block, for_a, for_u or u is None)
        check_storable(a, stored.bits, 2 * rows_a.shape[0] * ceil_div(rows_a.shape[1], block), block)
        if eager and (u is None or in_plain_eager_mode(u)):
            z, values = gate_eagerly(rows_a, rows_u, function, stored, dtype)
        else:
            z, values = gate(rows_a, rows_u, function, stored, dtype)
        ctx.stored, ctx.layout, ctx.rows = stored, layout, rows_a.shape
        ctx.shapes = a.shape, None if u is None else u.shape
        ctx.dtypes = a.dtype, rows_u.dtype
        ctx.save_for_backward(values)
        return no_view(z.view(shape))

    @staticmethod
    @once_differentiable("a gated product whose factors are kept quantized")
    def backward(ctx: Any, eager: bool, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of ``a`` and ``u``; ``grad_output`` has the shape of their product."""
        (values,) = ctx.saved_tensors  # the bytes of q and p, [2 R, L]
        of_rows = gate_grad_eagerly if eager else gate_grad
        grad_a, grad_u = of_rows(grad_output.reshape(ctx.rows), values, ctx.stored, ctx.layout, *ctx.dtypes)
        shape, shape_u = ctx.shapes
        return (
            None if grad_a is None else grad_a.view(shape),
            None if grad_u is None else grad_u.view(shape_u),
        )


_gated = make_apply(GatedFunction)


def _rows(a: Tensor, u: Tensor | None, layout: int, dim: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return gate and factor as rows, and the shape of their product; contiguous tensors are not copied."""
    if u is not None:
        rows, length = math.prod(a.shape[:-1]), a.shape[-1]
        return a.reshape(rows, length), u.reshape(rows, length), list(a.shape)
    shape = [*a.shape[:dim], a.shape[dim] // 2, *a.shape[dim + 1 :]]
    length = math.prod(shape[dim:])
    joint = a.reshape(math.prod(shape[:dim]), 2 * length)
    first, second = joint[:, :length], joint[:, length:]
    return (first, second, shape) if layout == GATE_FIRST else (second, first, shape)


def gate_eagerly(
    a: Tensor, u: Tensor, function: StoredDerivative, stored: StoredFactors, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the results of ``gate``, by the kernel if it takes the inputs."""
    a, u = _side_by_side(a), _side_by_side(u)
    launch = _forward_launches.find((dtype, function, stored), a, u)
    if launch is None:
        return gate(a, u, function, stored, dtype)
    z, values = a.new_empty(a.shape, dtype=dtype), a.new_empty(stored.shape(*a.shape), dtype=torch.uint8)
    with on_device_of(a):
        launch(a, u, z, values)
    return z, values


def gate_grad_eagerly(
    grad: Tensor, values: Tensor, stored: StoredFactors, layout: int, of_a: torch.dtype, of_u: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the results of ``gate_grad``, by the kernel if it takes the gradient."""
    grad = _side_by_side(grad)
    launch = _backward_launches.find((of_a, of_u, stored, layout), grad, values)
    if launch is None:
        return gate_grad(grad, values, stored, layout, of_a, of_u)
    rows, length = grad.shape
    joint = grad_a = grad_u = None
    if layout != SEPARATE:
        joint = grad.new_empty(rows, 2 * length, dtype=of_a)
        first, second = joint[:, :length], joint[:, length:]
        grad_a, grad_u = (first, second) if layout == GATE_FIRST else (second, first)
    else:
        grad_a = grad.new_empty(rows, length, dtype=of_a) if stored.for_a else None
        grad_u = grad.new_empty(rows, length, dtype=of_u) if stored.for_u else None
    with on_device_of(grad):  # the kernel does not write a gradient that is not needed
        launch(grad, values, grad if grad_a is None else grad_a, grad if grad_u is None else grad_u)
    return (grad_a, grad_u) if joint is None else (joint, None)


def _side_by_side(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


# === Reference in plain torch =========================================================================================


def gate(
    a: Tensor, u: Tensor, function: StoredDerivative, stored: StoredFactors, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ``z [R, L]`` in ``dtype``, contiguous, and the bytes of q and p, in plain torch.

    Args:
        a: ``[R, L]`` in fp32 or 16 bits, of any strides.
        u: In the shape of ``a``, in fp32 or 16 bits.
        function: The activation function.
        stored: How the factors are stored.
        dtype: Type of ``z``.
    """
    p, q = factors(a, u, function)  # [R, L] each
    wanted = torch.cat([factor for factor, needed in ((q, stored.for_a), (p, stored.for_u)) if needed])
    return (p * u.float()).to(dtype).contiguous(), pack_all(wanted, stored.block_size, stored.bits)


def gate_grad(
    grad: Tensor, values: Tensor, stored: StoredFactors, layout: int, of_a: torch.dtype, of_u: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``a`` and ``u`` in plain torch, ``None`` for one whose factor was not stored.

    Args:
        grad: ``g [R, L]``.
        values: The bytes of q, then of p.
        stored: How the factors are stored.
        layout: ``SEPARATE``, or which half of one gradient ``[R, 2 L]`` is the gate's; that is then the first result.
        of_a: Type of the gradient of ``a``, and of the joint one.
        of_u: Type of the gradient of ``u``.
    """
    rows, length = grad.shape
    count, wide = stored.for_a + stored.for_u, grad.float()
    read = unpack_all(values, count * rows, length, stored.block_size, stored.bits, torch.float32)
    grad_a = (read[:rows] * wide).to(of_a) if stored.for_a else None
    grad_u = (read[(count - 1) * rows :] * wide).to(of_u) if stored.for_u else None
    if layout == SEPARATE or grad_a is None or grad_u is None:
        return grad_a, grad_u
    return torch.cat([grad_a, grad_u] if layout == GATE_FIRST else [grad_u, grad_a], 1), None


def factors(a: Tensor, u: Tensor, function: StoredDerivative) -> tuple[Tensor, Tensor]:
    """Return p and q in fp32."""
    activation, wide = ACTIVATIONS[function.function], a.float()
    derivative = activation.derivative(wide, *function.parameters)
    if activation.exact:
        low, high = function.bounds()
        derivative = torch.where(derivative, high, low)
    return activation.forward(wide, *function.parameters), u.float() * derivative


# === Launches =========================================================================================================


def _forward_launch(
    device: torch.device,
    a: TensorKey,
    u: TensorKey,
    dtype: torch.dtype,
    function: StoredDerivative,
    stored: StoredFactors,
) -> Launch | None:
    (rows, length), (stride_a, _), of_a, _ = a
    if not rows * length or choose_backend(a[0], of_a, device, stored.block_size, 1) == "reference":
        return None
    from lightning_actprune.kernels.gated import gate_launch

    constants = *function.function_constants(), *function.bounds(), function.exact()
    wanted = stored.for_a, stored.for_u
    return gate_launch((rows, length), (stride_a, u[1][0]), constants, wanted, stored.block_size, stored.bits)


def _backward_launch(
    device: torch.device,
    grad: TensorKey,
    values: TensorKey,
    of_a: torch.dtype,
    of_u: torch.dtype,
    stored: StoredFactors,
    layout: int,
) -> Launch | None:
    (rows, length), (stride, _), of_grad, _ = grad
    if not rows * length or choose_backend(grad[0], of_grad, device, stored.block_size, 1) == "reference":
        return None
    from lightning_actprune.kernels.gated import gate_grad_launch

    strides = stride, length * (1 if layout == SEPARATE else 2)
    return gate_grad_launch((rows, length), strides, (stored.for_a, stored.for_u), stored.block_size, stored.bits)


_forward_launches = LaunchCache(_forward_launch)
_backward_launches = LaunchCache(_backward_launch)


# === Functional form ==================================================================================================


def gated(
    a: Tensor, u: Tensor | None, function: str, *parameters: float, bits: int = 4, block_size: int = 32
) -> Tensor:
    """Multiply a gate ``f(a)`` with ``u``, storing the factors of both gradients quantized instead of ``a`` and ``u``.

    The output is exact. The gradients are ``u f'(a) g`` and ``f(a) g``, whose factors have random errors of mean zero
    (``operators.gated``). This is torch's function and a product in no-grad mode, in a ``torch.func`` transform, during
    export, if an input is sparse or nested, and if none needs a gradient.

    Args:
        a: Input of the function, in fp32 or 16 bits. Rows may have gaps: a half of a joint projection is read in place.
        u: In the shape of ``a``. ``None``: ``a`` is a joint projection, whose first half along the last dimension is
            the gate and whose second half is ``u``; its gradient is then written as one tensor, without a copy.
        function: As in ``activation``.
        parameters: All parameters of the function.
        bits: Bits of each value of each factor: 2, 3, 4 or 8.
        block_size: Consecutive values that share a scale, at least 8; shorter rows shorten it.

    Returns:
        ``f(a) u``, in the type of torch's result (autocast included).

    Raises:
        TypeError: If an input is a DTensor, or its type is not supported.
        ValueError: If an argument is out of range, shapes differ, or ``a`` cannot be halved.

    Example:
        >>> import torch
        >>> from lightning_actprune import functional
        >>> a, u = torch.randn(2, 8, 64, requires_grad=True).unbind()
        >>> functional.gated(a, u, "silu", bits=4).shape
        torch.Size([8, 64])
    """
    stored = check_stored(function, parameters, bits)
    check_block_size(block_size, stored.bits)
    if u is None and (a.dim() == 0 or a.shape[-1] % 2):
        raise ValueError(f"`a` must have two halves along its last dimension, got {tuple(a.shape)}. HINT: pass `u`.")
    if u is not None and a.shape != u.shape:
        raise ValueError(
            f"`a` and `u` must have one shape, got {tuple(a.shape)} and {tuple(u.shape)}. HINT: expand one of them."
        )
    inputs = [a] if u is None else [a, u]
    if any(x.requires_grad for x in inputs) and all(map(may_compress, inputs)):
        return gated_halves(a, stored, block_size) if u is None else gated_product(a, u, stored, block_size)
    first, second = a.chunk(2, -1) if u is None else (a, u)
    return ACTIVATIONS[function].forward(first, *stored.parameters) * second


def gated_product(
    a: Tensor, u: Tensor, function: StoredDerivative, block_size: int, widens: bool | None = None
) -> Tensor:
    """Return ``f(a) u`` of tensors of one shape, at least one of which needs a gradient.

    With ``widens`` (default: as torch's function), autocast on a GPU makes ``f(a)`` fp32.
    """
    if a.dim() == 0:
        return gated_product(a.reshape(1), u.reshape(1), function, block_size, widens).reshape(())
    for x in (a, u):
        check_input(x, function, exact=False)
    dtype = torch.promote_types(activated_dtype(a, function, widens), u.dtype)
    order = _find_order(a) if a.stride() == u.stride() else None
    if order is None:
        return cast(Tensor, _gated(a, u, SEPARATE, -1, function, block_size, dtype))
    z: Tensor = _gated(a.permute(order), u.permute(order), SEPARATE, -1, function, block_size, dtype)
    return z.permute(inverse_order(order))


def gated_halves(
    x: Tensor,
    function: StoredDerivative,
    block_size: int,
    dim: int = -1,
    gate_first: bool = True,
    widens: bool | None = None,
) -> Tensor:
    """Return ``f(a) u`` of the halves of ``x`` along ``dim``; ``x`` needs a gradient."""
    check_input(x, function, exact=False)
    dtype = activated_dtype(x, function, widens)
    dim, layout = dim % x.dim(), GATE_FIRST if gate_first else GATE_LAST
    order = _find_order(x)
    if order is None:
        return cast(Tensor, _gated(x, None, layout, dim, function, block_size, dtype))
    z: Tensor = _gated(x.permute(order), None, layout, order.index(dim), function, block_size, dtype)
    return z.permute(inverse_order(order))


def _find_order(x: Tensor) -> list[int] | None:
    """Return the dimensions in the order of memory, or ``None`` if they already are, or if one is expanded."""
    strides = x.stride()
    if x.is_contiguous() or 0 in strides:
        return None
    order = memory_order(strides)
    return None if order == list(range(x.dim())) else order


# === Module classes ===================================================================================================


class CompressedGated(CompressedLayer):
    """Mixin of modules that compute a gated product.

    Raises:
        TypeError: If an input of the product is a DTensor, or in fp64.
        ValueError: If it has more than 2^30 blocks.
    """

    operator = "activation"
    always_own = True  # the backward of the dense layer would read both the sigmoid and its input


class CompressedProduct(CompressedGated):
    """Mixin of modules with an activation function, an attribute that ``replaced`` names, and a product with it."""

    always_own = False
    replaced: ClassVar[str]

    @property
    def traced(self) -> Traced:
        """Marked if the function is smooth: the inputs of the product are marked then, not that of the module."""
        is_known = _is_known(getattr(self, self.replaced))
        return "marked" if is_known and self._stored()[0].function in SMOOTH else "own"

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress ``layer``, or ``None`` if its activation function is known."""
        function = getattr(layer, cls.replaced, None)
        if _is_known(function):
            return None
        return f"its activation function, a {type(function).__name__}, is not one that is known"

    def product(self, a: Tensor, u: Tensor) -> Tensor:
        """Return ``f(a) u``."""
        if not (a.requires_grad or u.requires_grad) or a.shape != u.shape:
            return cast(Tensor, getattr(self, self.replaced)(a) * u)
        if self._is_marked():
            return self._multiply_marked(a, u)
        return gated_product(a, u, *self._stored())

    def product_of_halves(self, x: Tensor, dim: int, gate_first: bool) -> Tensor:
        """Return ``f(a) u`` of the halves of ``x``."""
        if not x.requires_grad:
            first, second = x.chunk(2, dim)
            function = getattr(self, self.replaced)
            return cast(Tensor, function(first) * second if gate_first else first * function(second))
        if self._is_marked():
            first, second = x.chunk(2, dim)
            return self._multiply_marked(first, second) if gate_first else self._multiply_marked(second, first)
        function, block_size, widens = self._stored()
        return gated_halves(x, function, block_size, dim, gate_first, widens)

    def _is_marked(self) -> bool:
        """Return True if a compiler traces the dense module with marks in it."""
        return is_compiling() and self._state.marks is not None and not is_exporting()

    def _multiply_marked(self, a: Tensor, u: Tensor) -> Tensor:
        """Return ``f(a) u`` by torch's operations, with marks for a compiler that packs the tensors of backward."""
        stored, _, widens = self._stored()
        a_read = self._state.mark_input(a, trained=False).to(activated_dtype(a, stored, widens))
        factor = ACTIVATIONS[stored.function].forward(a_read, *stored.parameters)
        product: Tensor = self._state.mark_input(factor, trained=False) * self._state.mark_input(u, trained=False)
        return product

    def _stored(self) -> tuple[StoredDerivative, int, bool | None]:
        function = getattr(self, self.replaced)
        compressed = activation_class(type(function))
        assert compressed is not None
        return compressed.describe_stored(function, self.bits), self.block_size, compressed.is_widened(function)


class CompressedGatedMLP(CompressedProduct):
    """Mixin of MLPs whose hidden values are a gated product."""

    down_proj: nn.Module

    def _dense_forward(
        self, dense: type[nn.Module], state: LayerState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the dense module with the inputs of its product marked."""
        if not torch.is_grad_enabled():
            return super()._dense_forward(dense, state, args, kwargs)
        (x,) = *args, *kwargs.values()
        return self.output(self.hidden(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the dense module, storing factors quantized if a gradient is recorded."""
        if not (may_compress(x) and _is_known(getattr(self, self.replaced))):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.output(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Return the gated product."""
        raise NotImplementedError

    def output(self, hidden: Tensor) -> Tensor:
        """Return the output, by default the projection of the product."""
        return cast(Tensor, self.down_proj(hidden))


class CompressedLlamaMLP(CompressedGatedMLP):
    """Mixin of transformers' ``LlamaMLP`` and its many copies."""

    replaced = "act_fn"
    reads = "gate_proj", "up_proj", "down_proj", "act_fn"
    gate_proj: nn.Module
    up_proj: nn.Module

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of two projections."""
        return self.product(self.gate_proj(x), self.up_proj(x))


class CompressedPhi3MLP(CompressedGatedMLP):
    """Mixin of transformers' ``Phi3MLP`` and its copies, which have one joint projection."""

    replaced = "activation_fn"
    reads = "gate_up_proj", "down_proj", "activation_fn"
    gate_up_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the dense module, storing factors quantized if a gradient is recorded."""
        return super().forward(hidden_states)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of the halves of a projection."""
        return self.product_of_halves(self.gate_up_proj(x), -1, gate_first=True)


class CompressedTimmMLP(CompressedGatedMLP):
    """Mixin of gated MLPs of timm, which apply dropout to the product and may normalise it."""

    replaced = "act"
    drop1: nn.Module
    norm: nn.Module
    fc2: nn.Module
    drop2: nn.Module

    def output(self, hidden: Tensor) -> Tensor:
        """Return the projection of the product after dropout and norm."""
        return cast(Tensor, self.drop2(self.fc2(self.norm(self.drop1(hidden)))))


class CompressedTimmGluMlp(CompressedTimmMLP):
    """Mixin of timm's ``GluMlp``, which has one joint projection."""

    fc1: nn.Module
    gate_last: bool
    chunk_dim: int

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of the halves of a projection."""
        return self.product_of_halves(self.fc1(x), self.chunk_dim, not self.gate_last)


class CompressedTimmSwiGLU(CompressedTimmMLP):
    """Mixin of timm's ``SwiGLU``."""

    fc1_g: nn.Module
    fc1_x: nn.Module

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of two projections."""
        return self.product(self.fc1_g(x), self.fc1_x(x))


class CompressedGLU(CompressedGated, nn.GLU):
    """``nn.GLU``: the first half times the sigmoid of the second."""

    dense_class = nn.GLU

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of the halves of ``input``."""
        dims = input.dim()
        if not keeps_derivative(input) or not -dims <= self.dim < dims or input.shape[self.dim] % 2:
            return super().forward(input)  # torch raises its own error
        function = StoredDerivative("sigmoid", (), self.bits)
        return gated_halves(input, function, self.block_size, self.dim, gate_first=False)


def _is_known(function: nn.Module | None) -> bool:
    """Return True if an activation module runs the forward of its class, and the class is supported."""
    if not isinstance(function, nn.Module) or "forward" in function.__dict__:
        return False
    return activation_class(type(function)) is not None


# === Classes covered ==================================================================================================

CLASSES: dict[type[nn.Module], type[CompressedGated]] = {nn.GLU: CompressedGLU}
"""The compressed class of each class of torch."""
FOREIGN: dict[tuple[str, str], type[CompressedGated]] = {
    ("timm.layers.mlp", "GluMlp"): CompressedTimmGluMlp,
    ("timm.layers.mlp", "SwiGLU"): CompressedTimmSwiGLU,
    ("transformers.models.llama.modeling_llama", "LlamaMLP"): CompressedLlamaMLP,
    ("transformers.models.phi3.modeling_phi3", "Phi3MLP"): CompressedPhi3MLP,
}
"""The mixin for each class of another package, by module and name."""
