"""Stored tensors that wait in the memory of the host: the same gradients, less memory on the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from math import prod

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, Recompute, convert
from lightning_actprune.codec import host_copy
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.config import Config, PresetName, Rule
from lightning_actprune.convert import convert_layers, mark_layers, new_owner
from lightning_actprune.operators import offload, recompute

WIDTH, BLOCKS = 256, 8


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


class Stream:
    """Stands for a stream on which nothing waits."""

    def wait_stream(self, _: Stream) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def record_event(self, _: object) -> None: ...


@pytest.fixture
def moves_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> host_copy._Line:
    """Let tensors on a CPU be moved, by copies that are done at once; return the copies."""
    stream = Stream()
    for name, fake in {
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "stream": nullcontext,
        "Event": object,
        "is_current_stream_capturing": bool,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory=False, **options: empty_like(x, **options))
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    line = host_copy._Line(torch.device("cpu"))
    monkeypatch.setattr(host_copy, "_line_of", lambda _: line)
    for module in (recompute, offload):
        monkeypatch.setattr(module, "can_move", lambda x: type(x) is Tensor and x.nbytes >= 2**10)
    monkeypatch.setattr(host_copy, "ON_THE_WAY", 2**16)
    return line


def gradients_of(model: nn.Module, x: Tensor, steps: int) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        model(x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["keep", "exact", "8", "4", "16"])
@pytest.mark.gpu
def test_gradients_do_not_change(kind: str) -> None:
    found = []
    for is_moved in (False, True):
        model = build("cuda")
        convert(model, rules=rules_for(kind, is_moved))
        x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(1)).to("cuda").requires_grad_()
        found.append(gradients_of(model, x, steps=4))
    for kept, moved in zip(*found, strict=True):
        torch.testing.assert_close(moved, kept, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["keep", "8", "16"])
def test_gradients_and_copies_where_a_cpu_stands_for_the_device(kind: str, moves_on_a_cpu: host_copy._Line) -> None:
    found = []
    for is_moved in (False, True):
        model = build("cpu")
        convert(model, rules=rules_for(kind, is_moved))
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        found.append(gradients_of(model, x, steps=2))
        model(x * 2)  # its graph is dropped
    for kept, moved in zip(*found, strict=True):
        torch.testing.assert_close(moved, kept, rtol=0, atol=0)
    assert moves_on_a_cpu._count >= BLOCKS
    assert not moves_on_a_cpu._copies


def test_what_has_no_room_comes_when_it_is_read(
    moves_on_a_cpu: host_copy._Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "ON_THE_WAY", 0)
    tensors = [torch.full((64, 64), number) for number in range(8)]
    copies = [host_copy.share_copy(tensor) for tensor in tensors]
    empty_like, asked = torch.empty_like, []

    def allocate(x: Tensor, **options: object) -> Tensor:
        asked.append(x)
        if len(asked) % 2 == 0:  # each one that is not read yet
            raise torch.OutOfMemoryError
        return empty_like(x, **options)

    monkeypatch.setattr(torch, "empty_like", allocate)
    for tensor, copy in zip(tensors[-2::-1], copies[-2::-1], strict=True):  # the last one has not left
        torch.testing.assert_close(copy.unpack(), tensor, rtol=0, atol=0)
    assert len(asked) > len(tensors)


def test_inputs_in_16_bits_are_moved_too(moves_on_a_cpu: host_copy._Line) -> None:
    model = build("cpu").bfloat16()
    convert(model, rules=rules_for("16", True))
    for _ in range(2):  # one run of each block is compared
        y = model(torch.randn(64, WIDTH, dtype=torch.bfloat16))
    assert len(moves_on_a_cpu._copies) == BLOCKS - 1  # the first one's needs no gradient
    y.sum().backward()


def test_tickets_keep_copies_as_long_as_they_live(moves_on_a_cpu: host_copy._Line) -> None:
    values = torch.randint(256, (64, 32), dtype=torch.uint8)
    before = host_copy.share_copy(values)  # of a layer that is not compiled
    ticket = host_copy.to_host(values)
    for _ in range(2):  # a graph that is retained
        back = host_copy.from_host(ticket.detach(), 64, 32, values.device)
        torch.testing.assert_close(back, values, rtol=0, atol=0)
    copied = ticket.clone()
    del before, ticket
    assert not moves_on_a_cpu._copies
    with pytest.raises(RuntimeError, match="have copied what it keeps"):
        host_copy.from_host(copied, 64, 32, values.device)


def test_bytes_that_are_written_to_are_copied_again(moves_on_a_cpu: host_copy._Line) -> None:
    values = torch.zeros(64, 32, dtype=torch.uint8)
    first, same = host_copy.share_copy(values), host_copy.share_copy(values)
    values += 1
    assert first is same is not host_copy.share_copy(values)


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
        if not is_moved:  # tensors of which blocks are dropped will stay, too
            packed = [row for row in packing.rows if 0 < row.bits < 16]
            sizes = [row.stored_bytes for row in packed if row.stored_bytes * 8 >= row.bits * prod(row.shape)]
            assert sum(sizes) > kept[2] / 5
        found.append([parameter.grad for parameter in model.parameters()])
    for stayed, moved in zip(*found, strict=True):
        torch.testing.assert_close(moved, stayed, rtol=0, atol=0)
    assert kept[-1] < kept[2] - sum(sizes) + max(sizes) + 2 * host_copy.ON_THE_WAY  # the last may be on its way


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
