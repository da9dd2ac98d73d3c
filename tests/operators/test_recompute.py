"""Modules that run again in backward: exact outputs, gradients from few bits, what is stored, what is refused."""

from __future__ import annotations

import copy
import pickle
import random
from collections import UserList
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain, count
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_actprune import Keep, Recompute, convert, revert
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.codec.formats import row_bytes
from lightning_actprune.config import Config
from lightning_actprune.convert import LayerClaimedError, convert_layers, new_owner
from lightning_actprune.operators import base
from lightning_actprune.operators.base import Converted
from lightning_actprune.operators.recompute import RecomputedModule, find_blocks

ALONE = {"type:saved": None, "*": None}
"""Of layers none is converted."""
WIDTH, TOKENS = 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(16, WIDTH), nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(block: Callable[[], nn.Module] = Block, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(block).to(device), torch.randn(4, TOKENS, 16, device=device)


def cosine(actual: Tensor, right: Tensor) -> float:
    return torch.cosine_similarity(actual.double().flatten(), right.double().flatten(), dim=0).item()


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def step(model: nn.Module, x: Tensor, around: Any = None) -> tuple[Tensor, Tensor, int]:
    """Return output, gradient of all parameters, and bytes kept, of a step from the same random numbers."""
    model.zero_grad()
    torch.manual_seed(1)
    with around or nullcontext(), SavedTensorMeter(model, x) as meter:
        y = model(x)
        loss = y.float().square().mean()
    stored = meter.report().stored_bytes
    loss.backward()
    return y.detach(), gradient_of(model), stored


def compare_runs(model: nn.Module, x: Tensor) -> None:
    """Run the steps in which blocks have exact inputs, since their first run is compared with their second one."""
    for _ in range(3):  # two blocks in the first, none in the second
        step(model, x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("bits", "least", "autocast"),
    [
        (2, 0.97, False),
        (3, 0.99, False),
        (4, 0.998, True),
        (8, 0.9999, False),
        (8, 0.9999, True),
        (16, 0.9999, False),
        (None, 1, False),
        (None, 1, True),
    ],
)
def test_outputs_are_exact_and_gradients_close(bits: int | None, least: float, autocast: bool, device: str):
    model, x = build(device=device)
    around = lambda: torch.autocast(device, torch.bfloat16) if autocast else nullcontext()  # noqa: E731
    y, exact, dense = step(model, x, around())
    report = convert(model, rules={"blocks.*": Recompute(bits), **ALONE})
    assert [(block.fqn, block.kind) for block in report.recomputed] == [(f"blocks.{n}", "Block") for n in range(3)]
    compare_runs(model, x)
    ours, gradient, stored = step(model, x, around())
    assert torch.equal(ours, y)
    assert cosine(gradient, exact) >= least - 1e-6
    if bits is None:
        torch.testing.assert_close(gradient, exact, rtol=0, atol=0)
    values = len(x) * TOKENS * WIDTH
    of_input = 4 * values if bits is None else 2 * values if bits == 16 else values // 32 * row_bytes(32, bits, 0)
    if not autocast:  # where the head's input in 16 bits and copies of weights come in
        assert stored == 3 * of_input + 4 * values + 4 * y.numel()  # and what head and loss keep
    assert stored < dense / 3
    assert sorted(revert(model)) == [f"blocks.{n}" for n in range(3)]
    again = step(model, x, around())
    assert torch.equal(again[1], exact)
    assert not any(isinstance(module, Converted) or "_recompute" in vars(module) for module in model.modules())


def test_compressed_layers_inside_make_the_second_run_small():
    model, x = build()
    exact = step(model, x)
    report = convert(model, "balanced", rules={"blocks.?": Recompute(8), "blocks.1.mlp.*": None})
    assert len(report.recomputed) == 3
    inside = [layer.fqn for layer in report.converted if layer.fqn.startswith("blocks.")]
    assert len(inside) == 3 * 5 - 3
    y, gradient, _ = step(model, x)
    torch.testing.assert_close(y, exact[0])  # up to the norms' roundings
    assert cosine(gradient, exact[1]) > 0.99
    assert [module.recompute for module in model.modules() if isinstance(module, RecomputedModule)] == 3 * [Recompute()]


class Normed(nn.Module):
    """A block with running statistics, by two names, and a buffer that each call replaces, the first one adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS)
        self.alias = self.norm
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(()))
        self.late = self.late + 1
        return x + self.norm(self.linear(x)).relu()


def test_running_statistics_move_once_and_by_the_same_bits():
    model, x = build(Normed)
    ours = copy.deepcopy(model)
    convert(ours, rules={"blocks.*": Recompute(8), **ALONE})
    for _ in range(3):
        for net in (model, ours):
            assert torch.isfinite(step(net, x)[1]).all()
    expected, buffers = dict(model.named_buffers()), dict(ours.named_buffers())
    assert expected.keys() == buffers.keys()
    assert all(torch.equal(buffers[name], expected[name]) for name in expected)
    assert [int(buffers[f"blocks.0.{name}"]) for name in ("calls", "late", "norm.num_batches_tracked")] == [3, 3, 3]


class Takes(nn.Sequential):
    """Takes tensors in all ways there are, and returns several, nested."""

    def forward(self, x: Tensor, pair: tuple[Tensor, list[Tensor]], *, scale: dict[str, Tensor], power: int, flag=None):
        first, (second,) = pair
        out = super().forward(x).sin() * first + second**power * scale["by"]
        return {"out": (out, [first is x]), "sum": out.sum()}


def test_arguments_of_all_kinds():
    model, results = nn.ModuleList([Takes(nn.Linear(WIDTH, WIDTH))]), []
    leaf, mask = torch.randn(2, 8, 16, WIDTH).requires_grad_().unbind()
    for again in (False, True):
        if again:
            convert(model, rules={"0": Recompute(8), **ALONE})
        x = leaf * 2
        out = model[0](x, (x, [mask.detach()]), scale={"by": leaf}, power=3)
        assert out["out"][1] == [True]  # one tensor given twice is one tensor
        loss = out["out"][0].square().mean() + out["sum"]
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert 0.999 < cosine(results[0][1], results[1][1]) <= 1


class WritesTo(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(super().forward(x.clone().sin()))


@pytest.mark.parametrize(("bits", "least"), [(8, 0.9999), (16, 0.9999), (4, 0.97), (None, 1)])
def test_quantized_inputs_may_be_written_to(bits: int | None, least: float):
    """By the block, and by whoever comes after its call; what is kept as it is may not be."""
    convert(block := nn.Sequential(Block()), rules={"0": Recompute(bits), **ALONE})
    h = torch.randn(4, TOKENS, WIDTH, requires_grad=True) * 1
    loss = block(h).sum()
    with torch.no_grad():
        h.zero_()
    if bits is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()
    model, x = build(lambda: WritesTo(nn.Linear(WIDTH, WIDTH)))
    exact = step(model, x)
    convert(model, rules={"blocks.*": Recompute(bits), **ALONE})
    y, gradient, _ = step(model, x)
    assert torch.equal(y, exact[0])
    assert cosine(gradient, exact[1]) > least


def test_what_several_blocks_get_is_stored_once():
    blocks = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 4, WIDTH, batch_first=True) for _ in range(3))
    convert(blocks, rules={"?": Recompute(8), **ALONE})
    leaf = torch.randn(4, TOKENS, WIDTH, requires_grad=True)
    for _ in range(3):  # compared runs
        for block in blocks:
            block(leaf * 1, leaf * 2).sum().backward()
    with SavedTensorMeter(blocks, leaf) as meter:
        x, memory = leaf * 1, leaf * 2
        for block in blocks:
            x = block(x, memory)
    values = leaf.numel() // 32 * row_bytes(32, 8, 0)
    assert meter.report().stored_bytes == 4 * values  # three streams and one memory
    x.sum().backward()


def test_several_calls_accumulation_and_frozen_blocks():
    model, x = build()
    model.blocks[1] = model.blocks[0]
    model.blocks[2].requires_grad_(False)
    exact = [step(model, x)[1] for _ in range(2)]
    convert(model, rules={"blocks.*": Recompute(8), **ALONE})
    step(model, x)
    torch.manual_seed(1)
    model(x).square().mean().backward()
    assert cosine(gradient_of(model), sum(exact)) > 0.9999
    with SavedTensorMeter(model.requires_grad_(False), x) as meter:
        assert not model(x).requires_grad
    assert meter.report().stored_bytes == 0


def test_hooks_around():
    model, x = build()
    x.requires_grad_()
    convert(model, rules={"blocks.*": Recompute(8), **ALONE})
    compare_runs(model, x)
    _, expected, _ = step(model, x)
    dtypes: list[torch.dtype] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (dtypes.append(t.dtype), t.clone())[1], lambda t: t)
    assert torch.equal(step(model, x, hooks)[1], expected)
    assert dtypes.count(torch.uint8) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around(reentrant: bool):
    """Of modules that have not been compared, and of such that have been."""
    model, x = build()
    _, exact, _ = step(model, x.requires_grad_())
    convert(model, rules={"blocks.*": Recompute(8), **ALONE})
    for number in range(6):
        if number == 3:
            compare_runs(model, x)
        model.zero_grad()
        torch.manual_seed(1)
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        assert cosine(gradient_of(model), exact) > 0.9999


def test_copies_and_pickles(monkeypatch: pytest.MonkeyPatch):
    model, x = build()
    convert(model, rules={"blocks.*": Recompute(8), **ALONE})
    expected = step(model, x)[1]
    assert type(pickle.loads(pickle.dumps(model)).blocks[0]) is Block
    with monkeypatch.context() as patch:
        patch.setattr(base, "get_spawning_popen", object)
        spawned = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), spawned):
        assert torch.equal(step(other, x)[1], expected)
        assert isinstance(other.blocks[0], RecomputedModule)
        assert isinstance(other.blocks[0], Block)
        assert revert(other)
        assert type(other.blocks[0]) is Block
    assert [*model.state_dict()] == [*Net().state_dict()]


def test_rules_name_the_outermost_modules():
    model, _ = build()
    report = convert(model, rules={"blocks.0": None, "blocks.*": Recompute(4), "head": None})
    assert [block.fqn for block in report.recomputed] == ["blocks.0.mlp", "blocks.1", "blocks.2"]
    revert(model)
    rules = {"blocks.[01]": {"recompute": 2}, "blocks.*.norm": Keep(bits=8), "blocks.*": "max"}
    report = convert(model, rules=rules)
    again = [(block.fqn, block.recompute) for block in report.recomputed]
    assert again == [("blocks.0", Recompute(2)), ("blocks.1", Recompute(2))]
    bits = {row.fqn: row.keep.bits for row in report.converted}
    assert (bits["blocks.0.norm"], bits["blocks.1.mlp.0"]) == (8, 2)
    revert(model)
    report = convert(model, "recompute", rules={"head": Keep(bits=8)})
    assert {block.recompute for block in report.recomputed} == {Recompute(8)}
    assert [layer.fqn for layer in report.converted] == ["head"]  # those in blocks are dense


def test_what_cannot_run_again_is_listed_with_the_reason():
    model, _ = build(type("Checkpoints", (Block,), {"gradient_checkpointing": True}))
    model.own = nn.ModuleList([Block()])
    report = convert(model, rules={"blocks.*": Recompute(8), "own": Recompute(8), "head": Recompute(8)})
    assert {block.fqn for block in report.blocks if block.reason} >= {"blocks.0", "own", "head"}
    assert report.recomputed == []
    with pytest.raises(ValueError, match=r"blocks\.0"):
        convert(model, rules={"blocks.*": Recompute(8), **ALONE})
    model, _ = build()
    report = convert(model, rules={"*": Recompute(8)})
    assert {block.fqn for block in report.blocks if block.recompute is None} >= {"(root)", "blocks"}
    assert [block.fqn for block in report.recomputed] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_module_runs_again_for_one_owner_and_by_rules_that_mean_something():
    model, _ = build()
    convert(model, rules={"blocks.0": Recompute(8), **ALONE})
    with pytest.raises(LayerClaimedError, match=r"blocks\.0"):
        convert(model, rules={"blocks.*": Recompute(8), **ALONE})
    for rules, error, text in (
        ({"a": {"recompute": 5}}, ValueError, "got 5"),
        ({"a": {"recompute": True}}, TypeError, "got True"),
        ({"type:linear": Recompute()}, ValueError, "type:linear"),
        ({"blokcs.*": Recompute()}, ValueError, "blokcs"),
    ):
        with pytest.raises(error, match=text):
            convert(build()[0], rules=rules)


def repeated(times: int, make: Callable[[], nn.Module] = Block) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(times)))


def test_blocks_are_the_largest_repeated_classes():
    assert find_blocks(build()[0]) == [f"blocks.{n}" for n in range(3)]
    stages = repeated(4, lambda: nn.Sequential(nn.Linear(8, 8), repeated(3)))
    assert find_blocks(stages) == [f"{stage}.1.{n}" for stage in range(4) for n in range(3)]
    experts = repeated(6, lambda: nn.ModuleDict({"norm": nn.LayerNorm(8), "experts": repeated(4)}))
    assert find_blocks(experts) == [str(n) for n in range(6)]
    both = nn.ModuleDict({"decoder": repeated(6, type("Decoder", (Block,), {})), "encoder": repeated(6)})
    assert find_blocks(both) == [f"{kind}.{n}" for kind in both for n in range(6)]
    both["encoder"] = both["encoder"][:5]  # too few to count beside others
    assert find_blocks(both) == [f"decoder.{n}" for n in range(6)]
    text = nn.ModuleDict({"words": nn.Embedding(99999, 8), "body": repeated(6), "head": nn.Linear(8, 99999)})
    assert find_blocks(text) == [f"body.{n}" for n in range(6)]
    assert find_blocks(repeated(2, lambda: nn.Linear(8, 8))) == []
    with pytest.raises(ValueError, match="blocks"):
        convert(nn.Sequential(nn.Linear(64, 64), nn.GELU()), "recompute")


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["", "in place", "normalizer", "old spectral norm"])
def test_modules_that_are_compiled_alone_begin_as_the_first_run_did_or_run_once(kind: str):
    """The second one, whose buffer a compiler would read in backward as it is by then, runs once."""
    model, x = build((lambda: Stateful(kind)) if kind else Block)
    ours = copy.deepcopy(model.eval())  # a compiler draws dropout in another way
    convert(ours, rules={"blocks.*": Recompute(8), **ALONE})
    compiled = torch.compile(ours, backend="aot_eager")
    for number in range(2):
        ours.zero_grad()
        with (
            pytest.warns(UserWarning, match=r"blocks\.1.*HINT") if (kind, number) == ("in place", 0) else nullcontext()
        ):
            compiled(x).float().square().mean().backward()
        assert cosine(gradient_of(ours), step(model, x)[1]) > 0.9999
    torch.testing.assert_close(dict(ours.named_buffers()), dict(model.named_buffers()), rtol=0, atol=1e-6)


def test_converting_again_is_as_converting_for_the_first_time():
    for after in ({}, {"blocks.*": None}, {"blocks.0": Recompute(8)}, {"type:norm": Keep(bits=8)}):
        model, x = build()
        again, owner = copy.deepcopy(model), new_owner("test")
        convert_layers(again, Config("recompute"), owner)
        convert_layers(again, Config("balanced", rules=after), owner)
        convert_layers(model, Config("balanced", rules=after), owner)
        for net in (model, again):
            compare_runs(net, x)
        (_, right, stored), (_, actual, stored_again) = step(model, x), step(again, x)
        assert stored_again == stored
        assert torch.equal(actual, right)
        hooked = [{name for name, m in net.named_modules() if m._forward_pre_hooks} for net in (model, again)]
        assert hooked[0] == hooked[1]
        revert(again, owner)
        assert {type(module) for module in again.modules()} == {type(module) for module in build()[0].modules()}


class Draws(nn.Sequential):
    """A block that scales its input by random numbers of a generator that torch does not know, from some run on."""

    def __init__(self, draw, since=0):
        super().__init__(nn.Linear(8, 8))
        self.draw, self.since, self.runs = draw, since, 0

    def forward(self, x):
        self.runs += torch.is_grad_enabled() and x.grad_fn is not None
        draws = self.training and self.runs > self.since
        return x + super().forward(x * (self.draw() if draws else 1.0)).sin()


def drawn_gradients(model, steps):
    random.seed(3)
    numpy.random.seed(3)
    results = []
    for seed in range(steps):
        torch.manual_seed(seed)
        x = torch.randn(256, 8, requires_grad=True)
        model(x * 1).square().sum().backward()
        results.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
        model.eval()(x)
        model.train()
    return results, random.random(), numpy.random.rand()


@pytest.mark.parametrize("draw", [random.random, lambda: random.random() * numpy.random.rand()])
def test_generators_of_python_and_numpy_draw_the_same_again(draw):
    """Also in later steps, after a forward without gradients, and go on from where the first run has left them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Draws(draw) for _ in range(3)])
    exact, *after = drawn_gradients(model, 3)
    report = convert(model, "recompute", rules={"?": Recompute(bits=None)})
    assert len(report.recomputed) == 3
    ours, *ours_after = drawn_gradients(model, 3)
    assert ours_after == after
    for x, y in zip(chain(*ours), chain(*exact), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("draw", [random.Random(0).random, partial(next, count(10))])
def test_private_generators_and_counters_are_refused(draw):
    """Though a third run differs as much from the second as that from the first, as those of some kernels do."""
    model = nn.Sequential(*[Draws(draw) for _ in range(2)])
    convert(model, "recompute", rules={"?": Recompute(bits=None)})
    with pytest.raises(RuntimeError, match="'1'"):
        drawn_gradients(model, 1)


class Biased(nn.Sequential):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward((bias.softmax(-1) @ x).sin())


@pytest.mark.parametrize("choose", ["topk", "argmax"])
def test_a_token_has_the_same_experts_again(choose: str):
    seen: list[tuple[Tensor, Tensor]] = []

    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            logits = self.router(self.norm(x))
            values, indices = logits.topk(2) if choose == "topk" else (logits.amax(-1, True), logits.argmax(-1, True))
            seen.append((indices.clone(), values.detach() - logits.detach().gather(-1, indices)))
            return x + torch.einsum("...k,...kd->...d", values.softmax(-1), self.experts[indices])

    model, x = build(Routed)
    convert(model, rules={"blocks.*": Recompute(bits=2)})
    for _ in range(4):
        seen.clear()
        model(x).square().mean().backward()
        first, second = seen[:3], seen[:2:-1]  # backward begins at the end
        for (chosen, _), (again, off) in zip(first, second, strict=True):
            assert torch.equal(again, chosen)
            assert choose == "argmax" or not off.any()


def test_additive_masks_that_need_gradients_stay_as_they_are():
    model, x, bias = nn.Sequential(Biased(nn.Linear(32, 32))), torch.randn(2, 32, 32), torch.randn(2, 32, 32)
    mask, exact = torch.full((32, 32), torch.finfo(torch.float32).min).triu(1), None
    for n in range(4):
        [gradient] = torch.autograd.grad(model[0](x, 3 * bias.requires_grad_() + mask).square().sum(), bias)
        if n == 0:
            exact = gradient
            convert(model, rules={"0": Recompute(8), **ALONE})
        torch.testing.assert_close(gradient, exact)


def test_a_module_that_draws_later_on_is_found_and_warned_of():
    """In its fourth run here, of which the first without draws are counted twice by the block: both runs are."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Draws(random.random, since=4) for _ in range(2)])
    convert(model, "recompute", rules={"?": Recompute(bits=None)})
    with pytest.warns(UserWarning, match="Draws.* 4"):
        drawn_gradients(model, 4)


class Stateful(nn.Module):
    """A block that changes something when it runs, and computes with it."""

    def __init__(self, kind: str, shared: Any = None) -> None:
        super().__init__()
        self.kind, self.shared, self.fc = kind, shared, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(16, WIDTH))
        self.register_buffer("runs", torch.zeros(()))
        if kind == "old spectral norm":
            nn.utils.spectral_norm(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        match self.kind:
            case "codebook":
                nearest = torch.cdist(h.flatten(0, 1), self.codes).argmin(1)
                h = h * self.codes[nearest].view_as(h)
                self.runs += 1
                if self.runs == 3:  # which is not looked at
                    with torch.no_grad():
                        self.codes[nearest] = self.codes[nearest].lerp(h.flatten(0, 1), 0.5)
            case "normalizer":
                self.codes = self.codes.lerp(h.detach().mean((0, 1)), 0.1)
                h = h - self.codes[0]
            case "written to by others":
                h = h - self.codes[0]
            case "in place":
                self.codes.lerp_(h.detach().mean((0, 1)), 0.5)
                h = h * self.codes[0]
            case "counter":
                self.shared["runs"] = self.shared.get("runs", 0) + 1
                h = h.sin() if self.shared["runs"] % 2 else h.cos()
            case "shared":
                h = h * self.shared.setdefault("h", h)
                self.shared["h"] = h
            case "list":
                self.shared.append(h)
                h = torch.cat(list(self.shared)).sum(0) + h
            case "noise":  # as kernels without a fixed order of summation
                h = h + 1e-7 * torch.randn(h.shape, generator=self.shared)
        return x + h.tanh()


def exact_and_ours(
    kind: str, make: Callable[[], Any], steps: int = 3, compiles: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        shared = make()
        model, x = nn.Sequential(*(Stateful(kind, shared) for _ in range(3))), torch.randn(4, TOKENS, WIDTH)
        if again:
            convert(model, rules={"?": Recompute(None), **ALONE})
            model = torch.compile(model, backend="aot_eager") if compiles else model
        if kind == "written to by others":
            model.register_forward_hook(lambda model, *_: model[1].codes.__setitem__(0, 0.5))
        rows = [step(model, x.clone().requires_grad_()) for _ in range(steps)]
        results.append([*(row[1] for row in rows), *model.buffers()])
    return results[0], results[1]


@pytest.mark.parametrize(
    "kind", ["codebook", "normalizer", "in place", "old spectral norm", "written to by others", "noise"]
)
def test_the_second_run_begins_as_the_first_did(kind: str):
    exact, ours = exact_and_ours(kind, torch.Generator)
    for mine, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-4 if kind == "noise" else 0)


COMPILED = pytest.param("counter", dict, True, marks=pytest.mark.integration)


@pytest.mark.parametrize(
    ("kind", "make", "compiles"),
    [("counter", dict, False), ("shared", dict, False), ("list", UserList, False), COMPILED],
)
def test_a_block_that_cannot_run_again_is_named(kind: str, make: Callable[[], Any], compiles: bool):
    with pytest.raises(RuntimeError, match=r"(?s)'[012]' \(Stateful\).*HINT"):
        exact_and_ours(kind, make, 1, compiles)


def test_contexts_of_the_forward_are_those_of_the_second_run():
    model, x = build(lambda: nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, 0.1, batch_first=True))
    results = []
    for again in (False, True):
        if again:
            convert(model, rules={"blocks.*": Recompute(None), **ALONE})
        torch.manual_seed(1)
        weights = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH):
            loss = torch.func.functional_call(model, weights, x).square().mean()
        results.append(torch.autograd.grad(loss, list(model.eval().parameters())))
        model.train()
    assert all(map(torch.equal, *results))
    assert torch.func.grad(lambda x: model(x).sum())(x).shape == x.shape
    torch.testing.assert_close(torch.jit.trace(model.eval(), x, check_trace=False)(x), model(x))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_what_a_block_reads_may_not_be_written_to_before_backward(kind: str):
    model, x = build(lambda: Stateful("normalizer") if kind == "parameter" else nn.Sequential(nn.BatchNorm1d(TOKENS)))
    convert(model.eval(), rules={"blocks.*": Recompute(8), **ALONE})
    for _ in range(2):  # looked at, with copies of buffers
        model(x).sum().backward()
    loss = model(x).sum()
    with torch.no_grad():
        next(model.blocks[1].parameters() if kind == "parameter" else model.blocks[1].buffers()).mul_(1.5)
    with pytest.raises(RuntimeError, match=r"'blocks\.1'.*inplace operation.*HINT"):
        loss.backward()


@pytest.mark.foreign
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_of_transformers(implementation: str):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(vocab_size=99, num_key_value_heads=1, num_hidden_layers=2, **sizes)
    config._experts_implementation, config.use_cache = implementation, False
    torch.manual_seed(0)
    model, words = transformers.MixtralForCausalLM(config), torch.randint(0, 99, (4, 64))
    gradients = []
    for steps in (1, 4):  # in the first ones blocks that run again have exact inputs, to be compared
        for _ in range(steps):
            model.zero_grad()
            model(words, labels=words).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for name, p in model.named_parameters() if "experts" in name]))
        convert(model, "recompute") if steps == 1 else revert(model)
    assert cosine(*gradients) > 0.9995


@pytest.mark.foreign
def test_caches_of_keys_and_values_are_left_out():
    import transformers

    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    x, exact = torch.randint(99, (2, 32)), {}
    for again in (False, True):
        if again:
            convert(model, "recompute", rules={"type:saved": None})
        with pytest.warns(UserWarning, match="use_cache") if again else nullcontext():
            model(input_ids=x, labels=x).loss.backward()
        exact[again] = gradient_of(model)
        model.zero_grad()
    assert cosine(exact[True], exact[False]) > 0.9999
    with torch.no_grad():
        cache = model(input_ids=x).past_key_values
    with pytest.raises(RuntimeError, match=r"'model\.layers\.0'.*HINT"):
        model(input_ids=x, past_key_values=cache)
