"""Every strategy and precision: at sparsity 0 a fit is the dense one, bit for bit; pruned gradients are as by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from tests.support.helpers import Gradients, Net, assert_plain, trainer
from tests.support.ranks import RANKS, STEPS, Case, RankNet, Seen, fit_all

GPU_MARK = pytest.mark.gpu
CPU = [
    *(("ddp", precision) for precision in ("32-true", "bf16-mixed", "bf16-true", "64-true")),
    *(("fsdp2", precision) for precision in ("32-true", "bf16-mixed", "bf16-true")),
]
GPU = [
    *(("ddp", precision) for precision in ("32-true", "16-mixed", "bf16-mixed", "bf16-true")),
    *(("fsdp", precision) for precision in ("32-true", "16-mixed", "bf16-mixed")),
    *(("fsdp2", precision) for precision in ("32-true", "bf16-mixed", "bf16-true")),
    *((stage, precision) for stage in ("zero1", "zero2") for precision in ("32-true", "bf16-mixed")),
]
MATRIX = [
    *(("cpu", *entry) for entry in CPU),
    *(pytest.param("gpu", *entry, marks=GPU_MARK) for entry in GPU),
]
ON_EACH = pytest.mark.parametrize(("accelerator", "strategy", "precision"), MATRIX)
ACCELERATORS = pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=GPU_MARK)])

ZERO, DEEPSPEED = ("zero1", "zero2"), find_spec("deepspeed") is not None
DENSE, KEEPING, PRUNED = None, {"sparsity": 0.0}, {"sparsity": 0.6}
MAX = {"preset": "max", "sparsity": 0.5}
CLIP = {"norm": (0.1, nn.utils.clip_grad_norm_), "value": (0.002, nn.utils.clip_grad_value_)}

Runs = Callable[[str], Mapping[str, list[Seen]]]


def clipping(strategy: str) -> str:
    return "value" if strategy == "fsdp" else "norm"  # Lightning refuses the norm where parameters are flattened


def accumulated(strategy: str) -> dict[str, Any]:
    """Return the arguments of a Trainer that takes two batches a step, and clips."""
    algorithm = clipping(strategy)
    clip = {"gradient_clip_val": CLIP[algorithm][0], "gradient_clip_algorithm": algorithm}
    return {"accumulate_grad_batches": 2, **clip}


def cases(accelerator: str) -> list[Case]:
    matrix = [entry for entry in {"cpu": CPU, "gpu": GPU}[accelerator] if entry[0] not in ZERO or DEEPSPEED]
    strategies = sorted({strategy for strategy, _ in matrix})
    return [
        *(Case(*entry, pruning) for entry in matrix for pruning in (DENSE, KEEPING, PRUNED)),
        *(Case(strategy, "32-true", PRUNED, accumulated(strategy)) for strategy in strategies if strategy not in ZERO),
        *(Case(strategy, "bf16-mixed", MAX) for strategy in strategies),
        *(Case("tensor", "32-true", pruning) for pruning in (DENSE, KEEPING, PRUNED)),
    ]


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    """Return, for an accelerator, what two processes have seen of all cases, which they run when first asked."""

    @functools.cache
    def run(accelerator: str) -> Mapping[str, list[Seen]]:
        if accelerator == "gpu" and torch.cuda.device_count() < RANKS:
            pytest.skip(f"needs {RANKS} GPUs, found {torch.cuda.device_count()}")
        made = cases(accelerator)
        return dict(zip(map(repr, made), fit_all(made, accelerator, tmp_path_factory.mktemp("ranks")), strict=True))

    return run


def seen(runs: Runs, accelerator: str, *case: Any) -> list[Seen]:
    """Return what each process has seen of a case that went well."""
    if case[0] in ZERO and not DEEPSPEED:
        pytest.skip("needs deepspeed")
    found = runs(accelerator)[repr(Case(*case))]
    errors = [of_rank.error for of_rank in found if of_rank.error is not None]
    assert not errors, errors[0]
    return found


def assert_equal(found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)


def by_hand(parts: int = 1, clip: str | None = None, factor: float = 1.0) -> list[dict[str, Tensor]]:
    """Return the gradients of all steps if one process computes those of both and takes ``factor`` times their mean."""
    torch.manual_seed(0)
    model = RankNet()
    model.configure_model()
    convert(model, **PRUNED)
    optimizer, gradients = model.configure_optimizers(), []
    x, y = model.train_dataloader().dataset.tensors
    batches = [(x[rank::RANKS].chunk(STEPS), y[rank::RANKS].chunk(STEPS)) for rank in range(RANKS)]
    for step in range(0, STEPS, parts):
        optimizer.zero_grad()
        for part in range(step, step + parts):
            for xs, ys in batches:
                (factor * nn.functional.cross_entropy(model(xs[part]), ys[part]) / (parts * RANKS)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        if clip is not None:
            limit, cut = CLIP[clip]
            cut(model.parameters(), limit)
        optimizer.step()
    return gradients


@ON_EACH
@pytest.mark.slow
def test_at_sparsity_0_a_run_is_the_dense_one_bit_for_bit(runs, accelerator, strategy, precision):
    dense = seen(runs, accelerator, strategy, precision, DENSE)
    keeping = seen(runs, accelerator, strategy, precision, KEEPING)
    for ours, theirs in zip(keeping, dense, strict=True):
        assert ours.layers == [["ActivationPrunedLinear"] * 3] * STEPS
        assert_equal(ours.gradients, theirs.gradients)
        assert_equal([ours.state], [theirs.state])


@ON_EACH
def test_pruned_gradients_are_the_same_in_both_processes(runs, accelerator, strategy, precision):
    first, second = seen(runs, accelerator, strategy, precision, PRUNED)
    dense = seen(runs, accelerator, strategy, precision, DENSE)[0]
    assert first.layers == second.layers == [["ActivationPrunedLinear"] * 3] * STEPS
    assert len(first.gradients) == STEPS
    assert_equal(first.gradients, second.gradients)
    weights = [name for name in dense.state if name.endswith("weight")]
    for name in weights:
        assert not torch.equal(first.gradients[0][name], dense.gradients[0][name])
    assert all(grad.isfinite().all() for grad in first.gradients[-1].values())
    assert first.metrics["actprune/saved_frac"] > 0.3
    names = [name for name in first.metrics if name.startswith("actprune")]
    assert [first.metrics[name] for name in names] == [second.metrics[name] for name in names]


@ON_EACH
def test_nothing_is_left_and_the_checkpoint_is_that_of_the_dense_run(runs, accelerator, strategy, precision):
    dense = seen(runs, accelerator, strategy, precision, DENSE)
    for ours, theirs in zip(seen(runs, accelerator, strategy, precision, PRUNED), dense, strict=True):
        assert ours.left == theirs.left
        assert [(k, v.shape, v.dtype) for k, v in ours.state.items()] == [
            (k, v.shape, v.dtype) for k, v in theirs.state.items()
        ]


@pytest.mark.parametrize(
    ("accelerator", "strategy", "parts"),
    [
        *(("cpu", strategy, parts) for strategy in ("ddp", "fsdp2") for parts in (1, 2)),
        *(
            pytest.param("gpu", strategy, parts, marks=GPU_MARK)
            for strategy in ("ddp", "fsdp", "fsdp2")
            for parts in (1, 2)
        ),
        # With DeepSpeed, Lightning divides the loss by the number of batches, and DeepSpeed once more.
        *(pytest.param("gpu", stage, 1, marks=GPU_MARK) for stage in ZERO),
    ],
)
def test_pruned_gradients_are_the_mean_by_hand(runs, accelerator, strategy, parts):
    """Also over several batches, clipped: were clipping another, the steps behind the first would differ."""
    options = accumulated(strategy) if parts > 1 else {}
    found = seen(runs, accelerator, strategy, "32-true", PRUNED, options)[0].gradients
    # FSDP2 of torch 2.8 takes the sum where gloo has no mean, without us too.
    factor = RANKS if (accelerator, strategy) == ("cpu", "fsdp2") and torch.__version__.startswith("2.8") else 1.0
    expected = by_hand(parts, clipping(strategy) if parts > 1 else None, factor)
    # torch's own bounds for fp32: the same products, summed in another order where threads or GPUs share the work.
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("accelerator", "strategy"),
    [
        ("cpu", "ddp"),
        ("cpu", "fsdp2"),
        *(pytest.param("gpu", strategy, marks=GPU_MARK) for strategy in ("ddp", "fsdp", "fsdp2", *ZERO)),
    ],
)
def test_a_preset_in_both_processes(runs, accelerator, strategy):
    first, second = seen(runs, accelerator, strategy, "bf16-mixed", MAX)
    dense = seen(runs, accelerator, strategy, "bf16-mixed", DENSE)
    assert_equal(first.gradients, second.gradients)
    assert not torch.equal(first.gradients[0]["body.0.weight"], dense[0].gradients[0]["body.0.weight"])
    assert [first.left, second.left] == [of_rank.left for of_rank in dense]
    assert list(first.state) == list(dense[0].state)


@ACCELERATORS
def test_tensor_parallel_layers_at_sparsity_0_are_the_dense_ones(runs, accelerator):
    dense = seen(runs, accelerator, "tensor", "32-true", DENSE)
    kept = seen(runs, accelerator, "tensor", "32-true", KEEPING)
    for ours, theirs in zip(kept, dense, strict=True):
        assert ours.layers[0] == ["ActivationPrunedLinear"] * 3
        assert ours.left == theirs.left
        assert_equal(ours.gradients, theirs.gradients)


@ACCELERATORS
def test_tensor_parallel_layers_are_pruned_on_their_shards(runs, accelerator):
    dense = seen(runs, accelerator, "tensor", "32-true", DENSE)
    pruned = seen(runs, accelerator, "tensor", "32-true", PRUNED)
    assert_equal(pruned[0].gradients, pruned[1].gradients)
    for ours, theirs in zip(pruned, dense, strict=True):
        assert ours.layers[0] == ["ActivationPrunedLinear"] * 3
        assert ours.left == theirs.left
        for name, gradient in theirs.gradients[0].items():
            exact = name.endswith("bias")
            assert exact == torch.allclose(ours.gradients[0][name], gradient, rtol=1e-4, atol=1e-6), name


@ACCELERATORS
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "64-true"])
def test_in_one_process_sparsity_0_is_the_dense_fit_too(precision: str, accelerator: str):
    """With accumulation and clipping; on CPU Lightning takes "16-mixed" for "bf16-mixed" and says so."""
    found = []
    for pruning in ([], [ActivationPruning(sparsity=0.0, verbose=False)]):
        torch.manual_seed(0)
        model, noted = Net(), Gradients()
        options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        trainer(*pruning, noted, accelerator=accelerator, precision=precision, **options).fit(model)
        found.append([noted.seen, model.state_dict()])
        assert_plain(model)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA, once in use, does not survive the fork")
def test_the_processes_of_a_notebook():
    model = RankNet()
    pruning, monitor = ActivationPruning(sparsity=0.6), ActivationMemoryMonitor(1, verbose=False)
    made = trainer(pruning, monitor, strategy="ddp_notebook", devices=RANKS, limit_val_batches=0)
    made.fit(model)
    assert made.callback_metrics["actprune/saved_frac"] > 0.3
    assert_plain(model)


class Logging(RankNet):
    """Logs what is reduced over the processes at the end of the epoch; its callbacks stand behind the progress bar."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return [ActivationMemoryMonitor(1, verbose=False)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA, once in use, does not survive the fork")
def test_metrics_reduced_for_the_progress_bar_of_one_process():
    made = trainer(strategy="ddp_notebook", devices=RANKS, limit_val_batches=0, enable_progress_bar=True)
    made.fit(Logging())
    assert made.callback_metrics["mean"] == 0.5
    assert made.callback_metrics["actprune/stored_mib"] > 0
