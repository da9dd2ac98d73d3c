"""The mixins of converted modules, and the state of a compressed layer.

A layer is compressed by reassigning its ``__class__`` (``convert``). It gets one plain attribute, its ``LayerState``,
so that reverting leaves nothing behind, and no buffer or parameter appears.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from lightning_actprune.codec.blocks import Blocks, TopkGroup, sparsity_parts
from lightning_actprune.codec.private import any_global_hook, is_exporting
from lightning_actprune.compiled.marks import mark_input, mark_output
from lightning_actprune.config import Keep, Operator
from lightning_actprune.operators.offload import offload_packed
from lightning_actprune.operators.tensor_parallel import forward_dtensor, has_dtensor_parameters
from lightning_actprune.schedules import check_sparsity

Marks = tuple[str, str, int, bool]
"""The text of the mark of an input (``compiled.marks``), empty for none; that for an input of few rows; how many rows
are few; whether graphs may be cut before the layer. It is one constant, since a compiler checks in every step all that
it read of a layer."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """The settings of a compressed layer, and their owner.

    ``forward`` reads the sparsity as the size of ``parts``, a tensor without memory: to ``torch.compile`` the size of a
    tensor is a symbol from its second value on, so a schedule compiles twice. No shape can be computed from a float
    attribute, and an int attribute of a module is a constant, of which each value would compile anew.

    Args:
        keep: The settings by preset and rules; their sparsity may be a schedule.
        sparsity: Fraction of blocks dropped now.
        owner: Name of the conversion of the layer, ``None`` if it was built compressed.
        highest: The highest sparsity of a schedule, by which layers are judged that have less now.
        features: Sizes of input and output at the conversion: a strategy may flatten or partition weights later.
        marks: The marks for a compiler; with ``None`` it sees the layer's own operators in place of the dense ones.
    """

    keep: Keep
    sparsity: float = 0.0
    owner: str | None = None
    highest: float = 0.0
    features: tuple[int, int] | None = None
    marks: Marks | None = None
    drops: bool = field(init=False, repr=False)
    """Whether it drops blocks now or later; if not, a compiler need not read ``parts``."""
    parts: Tensor = field(init=False, repr=False)
    blocks: Blocks = field(init=False, repr=False)
    """How inputs are cut into blocks and stored."""
    turned_blocks: Blocks = field(init=False, repr=False)
    """The blocks of an input whose samples are its second dimension, as inside attention."""

    def __post_init__(self) -> None:
        keep = self.keep
        blocks = Blocks(keep.block_size, keep.topk_over, keep.stored_bits, keep.selection)
        turned: TopkGroup = "sample_second" if keep.topk_over == "sample" else "token"
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "turned_blocks", blocks._replace(topk_over=turned))
        parts = torch.empty(sparsity_parts(self.sparsity), 0, dtype=torch.bool, device="meta")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "drops", self.sparsity > 0 or self.highest > 0)

    def is_fine(self, x: Tensor) -> bool:
        """Return whether an input ``[..., features]`` has so few rows that all of it is stored in eight bits."""
        return 0 < self.blocks.bits < 8 and x.numel() < self.keep.min_rows_for_low_bits * x.shape[-1]

    def of(self, x: Tensor, *, turned: bool = False) -> tuple[int, Blocks]:
        """Return the size of ``parts`` and the blocks of an input, ``turned`` for one inside attention."""
        blocks = self.turned_blocks if turned else self.blocks
        if self.keep.min_rows_for_low_bits and x.dim() and self.is_fine(x):
            return 0, blocks._replace(bits=8)
        return self.parts.size(0), blocks

    def mark_input(self, x: Any, trained: bool) -> Any:
        """Return an argument with its mark, if backward may need it; ``trained``: if a parameter needs a gradient."""
        mark = self._find_mark(x, trained)
        return x if mark is None else mark_input(x, *mark)

    def mark_output(self, y: Any, args: tuple[Any, ...]) -> Any:
        """Return the output of a layer with trained parameters, with the mark of its one argument."""
        if self.marks is None or not self.marks[3] or len(args) != 1:
            return y
        if not isinstance(y, Tensor) or isinstance(y, DTensor):
            return y
        mark = self._find_mark(args[0], trained=True)
        return y if mark is None else mark_output(y, args[0], *mark)

    def _find_mark(self, x: Any, trained: bool) -> tuple[str, int] | None:
        """Return text and sparsity of the mark of an argument, ``None`` if it gets none."""
        marks = self.marks
        if not isinstance(x, Tensor) or not (trained or x.requires_grad) or marks is None or not marks[0]:
            return None
        text, text_of_few, few_rows, _ = marks
        if few_rows and x.dim() > 0 and x.numel() < few_rows * x.shape[-1]:
            return text_of_few, 0
        return text, self.parts.size(0) if self.drops else 0


Traced = Literal["marked", "dense", "own"]
"""The dense layer with a marked input, the dense layer, or the layer's own operators."""


class Converted:
    """Mixin of every class that ``convert`` gives to modules; it comes first among their bases.

    A copy of a converted module is converted, and so is one that a spawned process gets. Any other pickle, such as a
    checkpoint, holds the dense module, and needs nothing of this package.
    """

    dense_class: ClassVar[type[nn.Module]]
    """The class of the module when it is not converted."""
    is_recomputed: ClassVar[bool] = False
    """Whether backward runs the forward of the module again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = vars(self).get("_state")
        built = isinstance(state, LayerState) and state.owner is None  # as a class of this package, by the user
        if built or (get_spawning_popen() is not None and "_replay" not in vars(self)):
            return super().__reduce_ex__(protocol)
        dense = torch_class(dense_class(type(self)))  # type: ignore[arg-type]
        module = dense.__new__(dense)
        module.__dict__.update({name: value for name, value in vars(self).items() if name not in OF_CONVERSION})
        make, arguments, *state = cast(tuple[Any, ...], module.__reduce_ex__(max(protocol, 2)))
        # A pickler compares the class that `__newobj__` makes with that of the object that it was given.
        return object.__new__ if make is copyreg.__newobj__ else make, arguments, *state  # type: ignore[attr-defined]

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if hasattr(super(), "__deepcopy__"):
            return super().__deepcopy__(memo)  # type: ignore[misc]
        make, arguments, state, *_ = cast(tuple[Any, ...], super().__reduce_ex__(4))
        copied = memo[id(self)] = make(*copy.deepcopy(arguments, memo))
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied


OF_CONVERSION = frozenset(("_state", "_recompute", "_replay"))
"""Attributes that ``convert`` and ``replay`` give to modules."""


class CompressedLayer(Converted):
    """Mixin of the classes of layers that compress what they save for backward."""

    operator: ClassVar[Operator]
    """The operator in rules and reports."""
    drops_blocks: ClassVar[bool] = False
    """Whether a sparsity applies to it."""
    replaced: ClassVar[str | None] = None
    """Name of a child that the compressed layer computes itself, and does not call."""
    stores: ClassVar[bool] = True
    """Whether the layer saves anything itself; one that only calls its children in another way is not listed."""
    one_bit: ClassVar[bool] = False
    """Whether it stores one bit a value, whatever its bits are."""
    takes_shards: ClassVar[bool] = False
    """Whether it runs on shards of DTensors (``operators.tensor_parallel``)."""
    always_own: ClassVar[bool] = False
    """Whether a compiler sees its own operators even with marks; attention that only routes has no state."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names that the forward of a class of another package reads. A class that reads them too is compared with it by
    its code (``operators.registry``); by default classes are recognised by name alone."""
    _state: LayerState

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the forward of ``cls`` call that of the dense class for a layer that was reverted.

        Libraries that move weights wrap the forward of a layer: they hold the bound method, and still call it then.
        """
        super().__init_subclass__(**options)
        compressed = vars(cls).get("forward")
        if compressed is None and "dense_class" in vars(cls):
            compressed = getattr(cls.forward, "compressed", None)  # type: ignore[attr-defined]
        if compressed is None:
            return
        # Bound here, since a compiler checks in every step all that it looked up in a layer or its class.
        own, dense, traced = cls.always_own, getattr(cls, "dense_class", None), cls._dense_forward
        splits = cls.takes_shards

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, cls):
                return type(self).forward(self, *args, **kwargs)
            if is_compiling() and not own:
                state = self._state
                if state.marks is not None and not is_exporting():
                    return traced(self, dense, state, args, kwargs)  # type: ignore[arg-type]
            if splits and len(args) + len(kwargs) == 1:
                x = args[0] if args else next(iter(kwargs.values()))
                if isinstance(x, DTensor) and has_dtensor_parameters(self):
                    return forward_dtensor(self, compressed, dense.forward, x)  # type: ignore[union-attr]
            settings = None if is_compiling() else vars(self).get("_state")
            if settings is not None and settings.keep.offload:
                with offload_packed():
                    return compressed(self, *args, **kwargs)
            return compressed(self, *args, **kwargs)

        # Each class has its own code object, since a compiler limits the compilations of one.
        forward.__code__ = forward.__code__.replace(co_name=f"{cls.__name__}.forward")
        cls.forward = functools.wraps(compressed)(forward)  # type: ignore[attr-defined]
        cls.forward.compressed = compressed  # type: ignore[attr-defined]

    def _dense_forward(
        self, dense: type[nn.Module], state: LayerState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward of the dense layer, with marks for the compiler that traces it."""
        if not torch.is_grad_enabled():  # no pass would remove the marks
            return dense.forward(self, *args, **kwargs)
        trained = needs_gradients(self)
        args = tuple(state.mark_input(x, trained) for x in args)
        kwargs = {name: state.mark_input(x, trained) for name, x in kwargs.items()}
        y = dense.forward(self, *args, **kwargs)
        return state.mark_output(y, (*args, *kwargs.values())) if trained else y

    @property
    def traced(self) -> Traced:
        """The view of the layer that a compiler gets; it is asked for when layers are marked."""
        if self.always_own:
            return "own"
        return "marked" if self.stores else "dense"

    @classmethod
    def operator_of(cls, layer: Any) -> Operator:
        """Return the operator of ``layer``, dense or compressed."""
        return cls.operator

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason why ``layer``, of a supported class, cannot become one of this class; ``None`` without."""
        return None

    @property
    def keep(self) -> Keep:
        """The settings by preset and rules."""
        return self._state.keep

    @property
    def bits(self) -> int:
        """Bits of a stored value, 0 for uncompressed values."""
        return self._state.keep.stored_bits

    @property
    def block_size(self) -> int:
        """Values per block."""
        return self._state.keep.block_size

    @property
    def owner(self) -> str | None:
        """Name of the conversion of the layer, ``None`` if it was built compressed."""
        return self._state.owner

    @property
    def sparsity(self) -> float:
        """Fraction of blocks dropped, in [0, 1). May be assigned between steps."""
        return self._state.sparsity

    @sparsity.setter
    def sparsity(self, value: float) -> None:
        self._state = replace(self._state, sparsity=check_sparsity(value))

    @property
    def highest_sparsity(self) -> float:
        """The highest sparsity of the layer in this training."""
        return max(self.sparsity, self._state.highest)

    def wait_at(self, sparsity: float) -> None:
        """Drop ``sparsity`` of the blocks for now; the layer is still judged by its highest sparsity."""
        self._state = replace(self._state, sparsity=check_sparsity(sparsity), highest=self.highest_sparsity)

    def drop_nothing(self) -> None:
        """Keep all blocks from now on."""
        self._state = replace(self._state, sparsity=0.0, highest=0.0)

    @property
    def packs(self) -> bool:
        """Whether the layer saves something else than the dense one."""
        return self.sparsity > 0 or self.bits > 0

    @property
    def reuses(self) -> bool:
        """Whether backward of the layer may use parameters of the norm before it (``operators.weight_grad``).

        Not with FSDP, which may gather the parameters of the norm at another time.
        """
        return "_is_fsdp_managed_module" not in self.__dict__

    def describe(self) -> str:
        """Return the settings as a printed module shows them, "" for a layer that has none."""
        if self.one_bit or not self.stores:
            return ""
        if not self.drops_blocks:
            return f"bits={self.bits}, block_size={self.block_size}"
        keep = self.keep
        shown = [] if keep.bits is None else [f"bits={keep.bits}"]
        shown += [f"sparsity={self.sparsity:g}", f"block_size={keep.block_size}"]
        shown += [] if keep.topk_over == "sample" else [f"topk_over={keep.topk_over!r}"]
        shown += [] if keep.selection == "largest" else [f"selection={keep.selection!r}"]
        return ", ".join(shown)

    def extra_repr(self) -> str:
        """Return what the dense module prints, and the settings."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (shown, self.describe())))

    def takes(self, x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> bool:
        """Return whether ``x`` is floating point, ends in ``shape`` and is on the device of the weight.

        Otherwise torch runs, and raises its own errors.

        Raises:
            TypeError: If a tensor is a DTensor.
        """
        if isinstance(x, DTensor) or isinstance(weight, DTensor):
            refuse_dtensors(x)
        if weight is not None and weight.device != x.device:
            return False
        return x.is_floating_point() and x.shape[-len(shape) :] == shape


def refuse_dtensors(x: Tensor) -> None:
    """Raise for a layer whose input ``x`` or weight is a DTensor: blocks of a shard are not those of the tensor."""
    if isinstance(x, DTensor):
        raise TypeError(
            "This compressed layer cannot take DTensors. HINT: keep it dense (`rules={name: None}`), or give it "
            "`x.to_local()`."
        )
    raise TypeError(
        "A compressed layer cannot take DTensors, and its weight is one. HINT: if `fully_shard` has split it, call the "
        "module that was given to `fully_shard`, by whose forward weights are gathered, and not a layer inside; keep "
        "tensor-parallel layers dense (`rules={name: None}`)."
    )


def needs_gradients(module: Any) -> bool:
    """Return whether a parameter of the module itself needs a gradient, in a way that compilers guard cheaply."""
    for parameter in module._parameters.values():  # noqa: SIM110
        if parameter is not None and parameter.requires_grad:
            return True
    return False


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything but the forward of its class runs when ``module`` is called."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or "forward" in module.__dict__ or any_global_hook()


def torch_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of torch or of the user that ``cls`` was made from."""
    while issubclass(cls, Converted):
        cls = cls.dense_class
    return cls


def is_quantized(layer: nn.Module) -> bool:
    """Return True if a layer's weight is frozen and stored in a form of its own, as bitsandbytes and torchao do."""
    weight = layer._parameters.get("weight")  # no weight that is computed, which looking it up would do
    if weight is None or type(weight) in (Tensor, nn.Parameter) or isinstance(weight, DTensor):
        return False
    return not weight.requires_grad


def dense_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return ``cls`` with the dense class in place of the compressed one; the same one each time.

    ``parametrize`` and ``fully_shard`` put a class of their own on top of a layer's, made for it at run time.
    """
    if not issubclass(cls, Converted):
        return cls
    if "dense_class" in vars(cls):
        return cls.dense_class
    dense = _dense_classes.get(cls)
    if dense is None:
        bases = tuple(dense_class(base) for base in cls.__bases__)
        namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        converted = next(base for base in cls.__mro__ if "dense_class" in vars(base))
        dense = type(cls.__name__.replace(converted.__name__, cls.dense_class.__name__), bases, namespace)
        _dense_classes[cls] = dense
    return dense


_dense_classes: weakref.WeakKeyDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakKeyDictionary()
"""The dense forms of classes on top of a converted one, so that modules of one class stay of one class."""
