"""Mixtures of experts as transformers builds them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune import Keep, convert
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, mark_layers, new_owner
from lightning_actprune.operators.base import CompressedLayer

try:
    import transformers
except ImportError:  # foreign tests are collected where they are not run
    transformers = None

pytestmark = pytest.mark.foreign

WIDTH, TOKENS = 128, 1024
EXACT = {"type:activation": None, "operation:silu": None, "operation:mul": None}
"""Rules by which gradients of inputs are exact, if weights are."""
SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 448, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 8},
    "Olmoe": {"intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 8},
    "DeepseekV3": {
        **{"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 8, "first_k_dense_replace": 0},
        **{"n_group": 4, "topk_group": 2},
    },
    "GptOss": {"intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 4},
}


def make_model(name: str, implementation: str = "grouped_mm") -> nn.Module:
    """Return a model with one block of experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "vocab_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes | {"pad_token_id": 0} | SIZES[name])
    config._experts_implementation = implementation
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def make_block(name: str, implementation: str = "grouped_mm") -> nn.Module:
    """Return a block of experts with its router."""
    block: nn.Module = make_model(name, implementation).model.layers[0].mlp
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5)
    return block


def run(block: nn.Module, x: Tensor, backward: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the output, the gradient of the input and those of the parameters."""
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    output = block(leaf * 1.0)
    y = output[0] if isinstance(output, tuple) else output
    if backward:
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return y, leaf.grad, {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}


def cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a.flatten().double(), b.flatten().double(), 0).item()


@pytest.mark.parametrize("name", SIZES)
def test_a_block_of_experts(name: str) -> None:
    x = torch.randn(4, TOKENS // 4, WIDTH)
    dense, block = make_block(name), make_block(name)
    report = convert(block, "max")
    assert "experts" in [row.fqn for row in report.converted]
    exact, found = run(dense, x), run(block, x)
    torch.testing.assert_close(found[0], exact[0], rtol=1e-5, atol=1e-5)  # with other experts far from it
    assert cosine(found[1], exact[1]) > 0.97
    cosines = {key: cosine(found[2][key], gradient) for key, gradient in exact[2].items() if key.startswith("experts.")}
    assert min(cosines.values()) > 0.95, cosines
    block = make_block(name).bfloat16()
    convert(block, "max")
    run(block, x.bfloat16())
    with SavedTensorMeter(block, x) as meter:
        run(block, x.bfloat16(), backward=False)
    memory = meter.report()
    assert memory.dense_bytes is not None
    assert memory.stored_bytes < 0.25 * memory.dense_bytes


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_the_dense_bytes_of_a_model_are_those_of_the_dense_model(name: str) -> None:
    tokens, dense_bytes = torch.randint(64, (1, TOKENS)), list[int | None]()
    model = make_model(name)
    for preset in (None, "max"):
        if preset is not None:
            convert(model, preset)
            model(tokens).logits.sum().backward()
        with SavedTensorMeter(model, tokens) as meter:
            model(tokens).logits.sum()
        dense_bytes.append(meter.report().dense_bytes)
    assert dense_bytes[0] == dense_bytes[1]


@pytest.mark.parametrize("name", ["Olmoe", "GptOss"])
def test_a_compiled_block_of_experts(name: str) -> None:
    x = torch.randn(4, TOKENS // 4, WIDTH, dtype=torch.bfloat16)
    dense, owner = nn.Sequential(nn.LayerNorm(WIDTH), make_block(name)).bfloat16(), new_owner("test")
    block = copy.deepcopy(dense)
    torch._dynamo.reset()
    with CompiledPacking() as packing:
        convert_layers(block, Config("max"), owner)
        mark_layers(block, owner, unmarked_layers=True)
        block.compile(backend="aot_eager")
        exact, found = run(dense, x), run(block, x)
    assert cosine(found[1], exact[1]) > 0.97
    cosines = {key: cosine(found[2][key], gradient) for key, gradient in exact[2].items() if "experts." in key}
    assert min(cosines.values()) > 0.95, cosines
    bits = {reader: row.bits for row in packing.rows if row.how != "again" for reader in row.readers}
    assert (bits["aten._grouped_mm"], bits["aten.mul"]) == (4, 4)


def test_a_loop_over_experts_stays_dense() -> None:
    block = make_block("Mixtral", "eager")
    report = convert(block, "max")
    (row,) = (row for row in report.skipped if row.fqn == "experts")
    assert "'eager' computes the gate itself" in str(row.reason)
    assert not isinstance(block.experts, CompressedLayer)
    assert isinstance(block.experts.act_fn, CompressedLayer)


def test_weights_that_are_selected_for_each_token_are_selected_again() -> None:
    x = torch.randn(1, 64, WIDTH)
    dense = make_block("Mixtral", "batched_mm")
    block = copy.deepcopy(dense)
    convert(block, "max", rules={"type:saved": Keep(bits=2), **EXACT})
    exact, found = run(dense, x), run(block, x)
    torch.testing.assert_close(found[1], exact[1])
    with SavedTensorMeter(block, x) as meter:
        run(block, x, backward=False)
    assert meter.report().stored_bytes < 2**21  # of 80 MiB
