"""Stored tensors that wait in the memory of the host: the same gradients, less memory on the device."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, Recompute, convert
from lightning_actprune.codec import host_copy
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.config import Config, PresetName, Rule
from lightning_actprune.convert import convert_layers, mark_layers, new_owner

WIDTH, BLOCKS = 256, 8
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.fc2, self.gate = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.fc2(self.act(self.fc1(y)))
        x += self.gate(y).sin()  # writes to what the first addition returned
        return x


def build(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(device)


def rules_for(kind: str, is_moved: bool) -> dict[str, Rule]:
    if kind == "keep":
        return {"*": Keep(bits=4, offload=is_moved), "type:saved": Keep(bits=8, offload=is_moved)}
    return {"?": Recompute(None if kind == "exact" else int(kind), offload=is_moved)}


def gradients_of(model: nn.Module, x: Tensor, steps: int) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        model(x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", ["keep", "exact", "8", "4", "16"])
def test_gradients_do_not_change(kind: str, device: str) -> None:
    rows, found = 4096 if device == "cuda" else 256, []
    for is_moved in (False, True):
        model = build(device)
        convert(model, rules=rules_for(kind, is_moved))
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        found.append(gradients_of(model, x, steps=4))
    for kept, moved in zip(*found, strict=True):
        torch.testing.assert_close(moved, kept, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["keep", "exact", "8", "4"])
def test_the_device_keeps_less(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "ON_THE_WAY", 2**20)
    kept, peaks = [], []
    for is_moved in (False, True):
        model = build("cuda")
        convert(model, rules=rules_for(kind, is_moved))
        x = torch.randn(2**15, WIDTH, device="cuda", requires_grad=True)
        for _ in range(3):  # decisions are made in the first ones
            model(x).mean().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(x).mean()
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del loss, model, x
    assert kept[1] < 0.5 * kept[0]
    assert peaks[1] < peaks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["keep", "8"])
def test_graphs_that_live_together_or_are_dropped(kind: str) -> None:
    models = [build("cuda") for _ in range(2)]
    for model, is_moved in zip(models, (False, True), strict=True):
        convert(model, rules=rules_for(kind, is_moved))
    x = torch.randn(2**14, WIDTH, device="cuda")
    found = []
    for model in models:
        for _ in range(2):
            model(x).mean().backward()
        model.zero_grad()
        torch.manual_seed(0)
        first, second, dropped = (model(x * scale).square().mean() for scale in (1.0, 2.0, 3.0))
        first.backward(retain_graph=True)  # before the others, so that none comes back in the order of storing
        del dropped
        filled = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(8)]  # takes memory that is free
        second.backward()
        first.backward()
        del filled
        found.append([parameter.grad for parameter in model.parameters()])
    for kept, moved in zip(*found, strict=True):
        torch.testing.assert_close(moved, kept, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("preset", ["max", "recompute"])
def test_compiled_code_moves_what_it_packs(preset: PresetName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "ON_THE_WAY", 2**20)
    kept, found = [], []
    x = torch.randn(2**15, WIDTH, device="cuda")
    for is_moved in (False, True):
        torch._dynamo.reset()
        model, owner = build("cuda"), new_owner("test")
        with CompiledPacking() as packing:
            convert_layers(model, Config(preset, offload=is_moved), owner)
            mark_layers(model, owner)
            call = torch.compile(model, dynamic=False)
            for step in range(3):
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.manual_seed(step)
                loss = call(x).square().mean()
                kept.append(torch.cuda.memory_allocated() - before)
                loss.backward()
                del loss
        assert any(row.bits for row in packing.rows)
        found.append([parameter.grad for parameter in model.parameters()])
    for stayed, moved in zip(*found, strict=True):
        torch.testing.assert_close(moved, stayed, rtol=0, atol=0)
    assert kept[-1] < 0.7 * kept[2]


@pytest.mark.parametrize("value", [1, "yes", None])
def test_offload_is_a_flag(value: object) -> None:
    for settings in (Keep, Recompute):
        with pytest.raises(TypeError, match="`offload` must be a bool"):
            settings(offload=value)  # type: ignore[arg-type]


def test_a_mapping_may_ask_for_it() -> None:
    rules: Mapping[str, Rule] = {"?": {"recompute": 4, "offload": True}}
    model = build("cpu")
    convert(model, rules=rules)
    assert {block.recompute for block in model} == {Recompute(4, offload=True)}  # type: ignore[union-attr]
