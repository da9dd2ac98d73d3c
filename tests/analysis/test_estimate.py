"""Steps without values: beside real ones on the CPU, byte for byte, and beside records of a GPU; what is printed."""

from __future__ import annotations

import copy
import json
import random
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn import Linear, Sequential
from torch.utils.checkpoint import checkpoint

from lightning_actprune import Keep, Recompute, convert
from lightning_actprune.__main__ import main
from lightning_actprune.analysis.caching_allocator import GRAIN, SMALL, WORKSPACE, WORKSPACES, CachingAllocator
from lightning_actprune.analysis.estimate import METHODS, EstimateRow, estimate
from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.analysis.simulate_step import compute_loss, simulate
from lightning_actprune.commands import estimate as command
from lightning_actprune.operators import saved
from lightning_actprune.operators.recompute import find_blocks
from lightning_actprune.report import ConversionReport
from tests.analysis.test_allocation import conv_net
from tests.support.conversion_models import Calls
from tests.support.stack import WIDTH, Residual

MIB = 2**20


def blocks() -> Sequential:
    return Sequential(Linear(32, WIDTH), *[Residual() for _ in range(3)], Linear(WIDTH, 4))


BATCH = torch.empty(1024, 32), torch.empty(1024, dtype=torch.int64)


def batch_for(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randint(4, shape[:1])


def really_kept(model: nn.Module, batch: Any, arguments: dict[str, Any] | None) -> int:
    """Return the bytes that the meter counts in the second forward of the real model on the CPU."""
    report = None if arguments is None else convert(model, rules={"type:saved": None}, **arguments)
    with RetentionProbe(model, batch) as probe:
        compute_loss(model, batch).backward()
    if report is not None:
        probe.apply(report)
        for name in [row.fqn for row in report.converted if row.sparsity and row.keep.max_dropped_energy < 1]:
            model.get_submodule(name).drop_nothing()
    with SavedTensorMeter(model, batch) as meter:
        compute_loss(model, batch)
    return meter.report().stored_bytes


@pytest.mark.parametrize(
    ("build", "shape", "arguments"),
    [
        (blocks, (1024, 32), None),
        (blocks, (1024, 32), {"preset": "balanced"}),
        (blocks, (1024, 32), {"preset": "paper"}),
        (blocks, (1024, 32), {"preset": "max", "sparsity": 0.5}),
        (conv_net, (16, 3, 34, 34), {"preset": "max"}),
    ],
)
def test_what_is_kept_is_what_a_real_step_keeps(build, shape: tuple[int, ...], arguments: dict[str, Any] | None):
    prepare = None if arguments is None else lambda model: convert(model, rules={"type:saved": None}, **arguments)
    step = simulate(build(), batch_for(shape), prepare, precision="32-true")
    assert step.activation_bytes[step.forward_end] == really_kept(build().train(), batch_for(shape), arguments)


def test_blocks_that_run_again_and_operations_without_layers_are_packed():
    steps = {name: simulate(blocks(), BATCH, lambda m, p=name: convert(m, p)) for name in ("balanced", "recompute")}
    kept = {name: step.activation_bytes[step.forward_end] for name, step in steps.items()}
    inputs = 1024 * WIDTH * 34 // 32  # of a block, in eight bits with a header a block of 32 values
    assert 3 * inputs < kept["recompute"] < 5 * inputs + 1024 * 4 * 4 < kept["balanced"]  # with what the loss keeps
    backward = {moment.fqn for moment in steps["recompute"].moments if moment.phase == "backward"}
    assert {"1.act", "2.act", "3.act"} <= backward  # each runs again there


def test_moments_add_up_and_end_where_they_began():
    model = blocks()
    step = simulate(model, BATCH)
    parameters = sum(p.nbytes for p in model.parameters())
    assert step.measured
    assert step.parameter_bytes == parameters == max(moment.gradient_bytes for moment in step.moments)
    assert step.moments[-1].used_bytes - step.moments[0].used_bytes == GRAIN  # the loss
    assert step.moments[0].optimizer_bytes >= 2 * parameters
    assert step.moments[0].used_bytes >= 3 * parameters + step.batch_bytes + WORKSPACES * WORKSPACE
    assert sum(step.parts(step.peak_in()).values()) == step.peak_bytes
    with torch.device("meta"):
        model, batch = blocks(), tuple(map(torch.empty_like, BATCH))
    assert simulate(model, batch).peak_bytes == step.peak_bytes


def kept_by(model: nn.Module, x: Tensor, precision: str = "bf16-mixed") -> int:
    step = simulate(model, x, precision=precision)
    return step.activation_bytes[step.forward_end]


def test_autocast_is_that_of_a_gpu():
    x = torch.empty(64, 128)
    rows, copies = 64 * 128, 128 * 128 * 2
    # Of the 16-bit product a norm keeps a copy in fp32, and two statistics a row.
    assert kept_by(Sequential(Linear(128, 128, bias=False), nn.LayerNorm(128, bias=False)), x) == (
        rows * 2 + rows * 4 + 64 * 4 * 2
    )
    # Softmax keeps its result, in fp32; the second product a copy of that, and of its weight.
    model = Sequential(Linear(128, 128, bias=False), nn.Softmax(-1), Linear(128, 128, bias=False))
    assert kept_by(model, x) == rows * 2 + rows * 4 + rows * 2 + copies
    assert kept_by(model, x, "32-true") == 2 * rows * 4 - rows * 4  # the result is the second one's input


@pytest.mark.parametrize(("masked", "dropout", "precision"), [(False, 0.1, "bf16-mixed"), (True, 0.0, "32-true")])
def test_attention_keeps_no_scores(masked: bool, dropout: float, precision: str):
    samples, tokens = 8, 512

    def attend(model: nn.Module, x: Tensor) -> Tensor:
        query, key, value = model.to_all(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if masked else None
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)

    kept = kept_by(Calls(attend, to_all=Linear(64, 192)), torch.empty(samples, tokens, 64), precision)
    size, scores = samples * tokens * 64 * (2 if precision == "bf16-mixed" else 4), samples * 4 * tokens**2
    assert 4 * size <= kept < 4 * size + scores  # query, key, value and result, the input's 16-bit copy, sums of rows


def test_nothing_of_the_model_changes_and_other_threads_compute_as_usual():
    model, batch = blocks(), batch_for((256, 32))
    model.append(nn.BatchNorm1d(4))
    model.eval()
    real = blocks()
    convert(real, "max")
    query = torch.randn(3, 1, 2, 8, 4)

    def compute() -> list[Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            softmax = F.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1)
        loss = compute_loss(real, batch)
        gradients = torch.autograd.grad(loss, list(real.parameters()))
        attended = F.scaled_dot_product_attention(*query, dropout_p=0.5)
        return [softmax, loss, *gradients, attended, F.dropout(query), copy.deepcopy(query)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        threads.append(executor.submit(compute).result())
        return compute_loss(model, batch)

    before, threads = compute(), []
    with ThreadPoolExecutor(1) as executor:
        simulate(model, batch, lambda m: convert(m, "max"), loss=loss)
    assert not any(module.training for module in model.modules())  # what else stays, tests of budgets compare
    assert before[0].dtype == torch.bfloat16
    for values in (*threads, compute()):  # the rules of autocast are those of CPUs
        torch.testing.assert_close(values, before, rtol=0, atol=0)


class Routed(Linear):
    by_values = False

    def forward(self, x: Tensor) -> Tensor:
        asked = x if self.by_values else torch.arange(len(x))
        return super().forward(x) if (asked >= 0).all() else x


def test_values_are_there_where_shapes_tell_them_and_missing_ones_name_the_module():
    x, routed = torch.empty(16, 8), Routed(8, 8)
    assert kept_by(Sequential(routed), x, "32-true") == 0  # but for the batch
    routed.by_values = True
    with pytest.raises(ValueError, match=r"'1' \(Routed\).*HINT"):
        simulate(Sequential(Linear(8, 8), routed), x)
    with pytest.raises(ValueError, match=r"'0' \(Linear\).*HINT"):
        simulate(Sequential(Linear(9, 8)), x)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"precision": "bf16"}, ValueError, "`precision` .*'bf16'.*HINT"),
        ({"loss": lambda model, batch: model(batch[0])}, TypeError, "`loss` .*HINT"),
        ({"presets": ["min"]}, ValueError, "`presets` .*'min'.*HINT"),
        ({"model": "vit"}, TypeError, "`model`"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        estimate(**({"model": blocks(), "batch": batch_for((8, 32))} | change))


def test_rows():
    result = estimate(blocks(), batch_for((4096, 32)))
    assert [row.method for row in result.rows] == list(METHODS)
    assert json.loads(json.dumps(result.to_rows())) == result.to_rows()
    sizes = [result[name].activation_bytes for name in ("dense", "paper", "balanced", "max", "recompute")]
    assert sizes == sorted(sizes, reverse=True)
    assert result["checkpoint"].activation_bytes < result["dense"].activation_bytes
    assert all(sum(row.parts.values()) == row.peak_bytes for row in result.rows)
    model = Sequential(Linear(8192, 8192, device="meta"))
    large = estimate(model, torch.empty(1, 8192), presets=["dense", "checkpoint"])
    assert large["dense"].large == ("temporary tensors", large["dense"].parts["other"])
    assert large["dense"].parts["optimizer state"] == 2 * 8192 * 8193 * 4 + 2 * 4  # and a count for weight and bias
    assert large["checkpoint"] == EstimateRow("checkpoint", None, large["checkpoint"].reason)
    assert "no class of blocks" in large["checkpoint"].reason


@pytest.mark.parametrize(("method", "samples"), [("dense", 64), ("max", 4000)])
def test_the_largest_batch_fits_and_the_next_one_does_not(method: str, samples: int):
    weights, memory = torch.ones(4), 2000 * MIB
    prepare = None if method == "dense" else lambda model: convert(model, "max")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"], batch["weights"])

    def make_batch(samples: int) -> dict[str, Tensor]:
        images = torch.empty(samples, 3, 34, 34).to(memory_format=torch.channels_last)
        return {"images": images, "labels": torch.randint(4, (samples,)), "weights": weights}

    model, batch = conv_net().to(memory_format=torch.channels_last), make_batch(samples)
    (row,) = estimate(model, batch, loss=loss, presets=[method], memory=memory).rows
    fitting, next_one = (simulate(model, make_batch(row.largest_batch + n), prepare, loss=loss) for n in (0, 1))
    noise = memory // 200  # of an allocator that has had batches of other sizes
    assert memory - 2 * noise < fitting.peak_bytes <= memory + noise
    assert next_one.peak_bytes > memory - noise


def test_no_batch_is_the_largest():
    batch = batch_for((64, 32))
    assert estimate(blocks(), batch, presets=["dense"], memory=WORKSPACE).rows[0].largest_batch == 0
    fixed = estimate(blocks(), batch, loss=lambda m, b: m(b[0].view(64, 32)).sum(), presets=["dense"], memory=100 * MIB)
    assert fixed.rows[0].largest_batch is None


def test_memory_is_handed_out_whole_and_comes_back():
    allocator, rng, out = CachingAllocator(), random.Random(0), {}
    empty, _ = allocator.ask()
    for number in range(400):
        if out and rng.random() < 0.45:
            del out[rng.choice(list(out))]
        else:
            out[number] = allocator.empty(rng.choice([1, 700, GRAIN, 30_000, 2 * MIB + 1, 30 * MIB]))
        used, _ = allocator.ask()
        sizes = [storage.nbytes() for storage in out.values()]
        assert empty + sum(sizes) <= used <= empty + sum(n + (GRAIN if n <= SMALL else SMALL + GRAIN) for n in sizes)
    reference = weakref.ref(out.popitem()[1])
    out.clear()
    assert reference() is None
    assert allocator.ask()[0] == empty
    for pool in (allocator._small, allocator._large):  # and what is free beside each other is one block again
        assert all(block.before is None and block.after is None for _, _, block in pool._free)


# The command.


@pytest.fixture
def _user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_module_of_a_user")
    vars(module).update(model=blocks(), build=lambda: (blocks(), batch_for((64, 32))), fails=lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.integration
@pytest.mark.usefixtures("_user_module")
def test_as_a_command(capsys):
    assert main(["estimate", "a_module_of_a_user:model", "--shape", "32", "--batch", "64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    presets = [name for name in METHODS if name != "paper"]
    assert rows == estimate(blocks(), batch_for((64, 32)), presets=presets).to_rows()
    assert main(["estimate", "a_module_of_a_user:build", "--presets", "dense", "max"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[1] for line in lines if "│" in line] == ["dense", "max"]
    peaks = {row.method: row.peak_bytes for row in estimate(blocks(), batch_for((64, 32))).rows}
    for memory, advice in (
        (peaks["dense"], "dense yes, max yes. Nothing has to be compressed"),
        (peaks["dense"] - 1, 'dense no, max yes. Use callbacks=[ActivationPruning("max")]'),
        (peaks["max"] - 1, "dense no, max no. Nothing does. Take a batch of at most 6"),
    ):
        options = ["--shape", "32", "--batch", "64", "--presets", "dense", "max", "--memory", f"{memory}B"]
        assert main(["estimate", "a_module_of_a_user:model", *options]) == 0
        assert advice in capsys.readouterr().out


@pytest.mark.usefixtures("_user_module")
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["vit"], "timm:NAME"),
        (["a_module_of_a_user:model"], "--shape"),
        (["a_module_of_a_user:nothing", "--shape", "32"], "AttributeError: module 'a_module_of_a_user' has"),
        (["a_module_of_a_user:fails"], "a_module_of_a_user:fails raised ZeroDivisionError: "),
        (["timm:vit", "--batch", "0"], "--batch"),
        (["timm:vit"], "pip install timm"),
        (["hf:gpt2"], "pip install transformers"),
    ],
)
def test_what_the_command_cannot_do(arguments: list[str], match: str, monkeypatch, capsys):
    for name in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["estimate", *arguments]) == 1
    result = capsys.readouterr()
    assert match in result.err
    assert result.out == ""


@pytest.mark.foreign
def test_models_of_libraries(capsys, monkeypatch):
    import transformers

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", mock.Mock(side_effect=OSError("offline")))
    for name, said in (
        ("timm:resnt18", "did you mean resnet18"),
        ("hf:org/a", "OSError: offline"),
        ("hf:detr", "'detr'"),
    ):
        assert main(["estimate", name]) == 1
        assert said in capsys.readouterr().err
    parsed = {"batch": 2, "length": 16, "shape": None}
    image = 2, 3, 224, 224
    for name, shape in (
        ("timm:resnet18", image),
        ("hf:gpt2", (2, 16)),
        ("hf:t5", (2, 16)),
        ("hf:vit", image),
        ("hf:segformer", image),
        ("hf:whisper", (2, 80, 3000)),
        ("hf:wav2vec2", (2, 160000)),
    ):
        model, batch = command.load_model(type("Arguments", (), parsed | {"model": name}))
        inputs = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        assert isinstance(model, nn.Module)
        assert inputs.shape == shape
    assert main(["estimate", "hf:gpt2", "--length", "16", "--presets", "dense"]) == 0
    assert "[32, 16]" in capsys.readouterr().out
    for task in ("MaskedLM", "QuestionAnswering", "TokenClassification"):  # the first for this type is a causal one
        assert command._find_task(transformers.BertConfig(architectures=[f"BertFor{task}"])) == task


# Beside records of a GPU.


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True), 12)


def vit() -> nn.Module:
    import timm

    return timm.create_model("vit_base_patch16_224")


RECORDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet50": (torchvision.models.resnet50, (3, 224, 224)),
    "TransformerEncoder": (encoder, (1024, 768)),
    "vit_base_patch16_224": (vit, (3, 224, 224)),
}
"""Builder and shape of a sample."""
TWO_BITS = Keep(bits=2, sparsity=0.5, max_dropped_energy=0.2)
AS_RECORDED: dict[str, dict[str, Keep | None]] = {
    "max": dict.fromkeys(("linear", "convolution"), TWO_BITS)
    | {"activation": Keep(bits=3), "norm": Keep(bits=4), "affine": Keep(bits=3), "scale": Keep(bits=2)}
    | {"saved": Keep(bits=8)},
    "recompute": {"linear": None},
}
"""What methods were when they were recorded, whatever presets are now."""
RECORDS = json.loads((Path(__file__).parent / "gpu_records.json").read_text())


def prepare_as_recorded(method: str, model: nn.Module) -> ConversionReport | None:
    if method == "checkpoint":
        for block in map(model.get_submodule, find_blocks(model)):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return None
    blocks = dict.fromkeys(find_blocks(model), Recompute()) if method == "recompute" else {}
    return convert(model, "paper", rules={f"type:{name}": keep for name, keep in AS_RECORDED[method].items()} | blocks)


def case(record: dict[str, Any]) -> Any:
    name = f"{record['model']}-{record['method']}"
    mark = pytest.mark.integration if name in ("resnet50-max", "TransformerEncoder-dense") else pytest.mark.nightly
    return pytest.param(record, marks=mark, id=name)


@pytest.mark.parametrize("record", list(map(case, RECORDS)))
def test_beside_the_records_of_a_gpu(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saved, "BITS_OF_SHAPE", 8)  # as for pooling when that was measured
    build, sample = RECORDED[record["model"]]
    shape, method = (record["batch"], *sample), record["method"]
    model, x, target = build(), torch.empty(shape), torch.empty(shape[:1], dtype=torch.int64)
    if record["model"] == "resnet50":
        model, x = (given.to(memory_format=torch.channels_last) for given in (model, x))
    batch = x, x.clone() if record["model"] == "TransformerEncoder" else target
    step = simulate(model, batch, None if method == "dense" else partial(prepare_as_recorded, method))
    assert step.activation_bytes[step.forward_end] / MIB == pytest.approx(record["activations_mib"], rel=0.01)
    assert step.peak_bytes / MIB == pytest.approx(record["peak_mib"], rel=0.01)
