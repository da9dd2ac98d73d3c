"""The models of ``bench_zoo.py``: of timm by name, of transformers by class, all of them small and untrained.

``zoo_models.json`` lists them. Models of timm are built with the arguments that stand there, at ``IMAGE_SIZE`` or a
larger size if at fewer pixels the last stage has nothing to do, and with fewer blocks where there is no small one.
Models of transformers are made tiny by the sizes of ``TINY`` that their configuration has and by ``sizes`` of the list;
``shape`` is that of their input if it is not what their kind of input has. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

IMAGE_SIZE = 96
IMAGES, TINY_IMAGES, SEQUENCES, TOKENS = 4, 16, 8, 64
"""Images of a batch for models of timm and of transformers, sequences of a batch, and tokens of a sequence."""
CLASSES, VOCABULARY, WIDTH, HEADS = 10, 512, 128, 4
LISTED = json.loads(Path(__file__).with_suffix(".json").read_text())
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **{"num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "d_kv": WIDTH // HEADS},
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2 * TOKENS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH},
    **{"image_size": 64, "patch_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
"""Sizes of a tiny model, by all the names that configurations have for them."""


@dataclass
class Sample:
    """A model in training mode and a batch for it: what it is called with, and the loss of what it returns."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]

    def inputs(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def timm_sample(name: str) -> Sample:
    """Return a model of timm, and images for it."""
    import timm

    arguments = {"num_classes": CLASSES} | LISTED["timm"][name]
    size = arguments.pop("img_size", IMAGE_SIZE)
    try:
        model = timm.create_model(name, img_size=size, **arguments)
    except TypeError:  # made for images of any size
        model = timm.create_model(name, **arguments)
    labels = torch.arange(IMAGES) % CLASSES

    def loss(output: Any) -> Tensor:
        return F.cross_entropy(output[0] if isinstance(output, (list, tuple)) else output, labels)

    return Sample(model.train(), (torch.randn(IMAGES, 3, size, size),), {}, loss)


def transformers_sample(name: str) -> Sample:
    """Return a tiny model of a class of transformers, and a batch of its kind of input."""
    import transformers

    made, listed = getattr(transformers, name), LISTED["transformers"][name]
    defaults, known = made.config_class(), inspect.signature(made.config_class.__init__).parameters
    # Models with a list of sizes, one for each stage, get theirs from the list.
    tiny = {
        size: n for size, n in TINY.items() if size in known and not isinstance(getattr(defaults, size), (list, tuple))
    }
    model = made(made.config_class(**(tiny | listed.get("sizes", {})))).train()
    inputs = {model.main_input_name: _input(model, listed.get("shape"))}
    if "labels" in inspect.signature(model.forward).parameters:
        if name.endswith(("SequenceClassification", "ImageClassification")):
            inputs["labels"] = torch.arange(len(inputs[model.main_input_name])) % model.config.num_labels
        elif "vocab_size" in vars(model.config) or model.main_input_name == "input_ids":
            inputs["labels"] = _tokens()
    weights = torch.Generator().manual_seed(0)

    def loss(output: Any) -> Tensor:
        if getattr(output, "loss", None) is not None:
            return output.loss
        first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
        # Random factors: what a norm returns has the same mean and mean square whatever its input is.
        return (first * torch.randn(first.shape, generator=weights.manual_seed(0))).mean()

    return Sample(model, (), inputs, loss)


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (SEQUENCES, TOKENS))


def _input(model: Any, shape: list[int] | None) -> Tensor:
    if shape is not None:
        return torch.randn(shape)
    if model.main_input_name in ("input_ids", "inputs"):
        return _tokens()
    if model.main_input_name == "input_values":
        return torch.randn(TINY_IMAGES, 4000)
    return torch.randn(TINY_IMAGES, 3, 64, 64)
