"""Small models of odd sizes that the conversion tests share."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Calls(nn.Module):
    """Calls a function of itself and its input, which reads the parts by their names."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mlp() -> nn.Sequential:
    """Two linear layers, ``fc1`` and ``fc2``, of odd sizes."""
    return nn.Sequential(OrderedDict(fc1=nn.Linear(65, 97), act=nn.GELU(), fc2=nn.Linear(97, 3)))


def deep() -> nn.Module:
    """``blocks.{0,1}.{fc1,fc2}`` and ``head``."""
    block = OrderedDict(fc1=nn.Linear(65, 97), act=nn.GELU(), fc2=nn.Linear(97, 65))
    blocks = nn.Sequential(nn.Sequential(block), nn.Sequential(copy.deepcopy(block)))
    return nn.Sequential(OrderedDict(blocks=blocks, head=nn.Linear(65, 7)))


def gpt2() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 99, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}
