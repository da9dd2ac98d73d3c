"""`examples/train.py`: comparable trainings, what they keep, the table, and wrong arguments."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import train
from examples.classifier import ImageClassifier

QUICK = ["--epochs=1", "--limit-batches=2", "--accelerator=cpu", "--precision=32-true", "--dim=64", "--depth=2"]


@pytest.fixture(scope="module")
def starts():
    """The first weights and the batches of each training that `results` has run."""
    return []


@pytest.fixture(scope="module")
def results(starts):
    """What each method made of two batches, by method."""
    step, start = ImageClassifier.training_step, ImageClassifier.on_train_start
    threads = torch.get_num_threads()

    def on_train_start(self):
        starts.append([sum(p.double().abs().sum().item() for p in self.parameters())])
        return start(self)

    def training_step(self, batch, batch_idx):
        starts[-1].append(batch[1].tolist())
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, "on_train_start", on_train_start)
        patch.setattr(ImageClassifier, "training_step", training_step)
        made = train.main(QUICK)
        dense, paper = train.main([*QUICK, "--preset", "paper", "--sparsity", "0.75", "--rules", "'*.fc1': dense"])
    torch.set_num_threads(threads)
    assert dense == made[0]
    return {result["method"]: result for result in [*made, paper]}


@pytest.mark.integration
def test_trainings_start_alike(results, starts):
    assert list(results) == ["dense", "checkpoint", "max", "recompute", "paper"]
    assert len(starts) == 6
    assert all(start == starts[0] for start in starts)
    assert len(starts[0]) == 1 + 2
    assert results["checkpoint"]["test_acc"] == results["dense"]["test_acc"]


@pytest.mark.integration
def test_memory_of_each_method(results):
    kept = {method: result["activation_bytes"] for method, result in results.items()}
    peak = {method: result["peak_bytes"] for method, result in results.items()}
    # Checkpointed blocks keep their inputs, 64 images of 16 tokens of 64 floats.
    assert 2 * 64 * 16 * 64 * 4 < kept["checkpoint"] < 0.2 * kept["dense"]
    assert kept["max"] < 0.12 * kept["dense"]
    assert kept["recompute"] < 0.5 * kept["checkpoint"]
    assert kept["dense"] < peak["dense"]
    assert kept["checkpoint"] < peak["max"] < peak["checkpoint"] < peak["dense"]
    # The paper's method drops three quarters of the inputs of fc2 and the head, in fp32, and stores the positions.
    inputs = 64 * 4 * (2 * 16 * 256 + 64)
    assert 0.74 < (kept["dense"] - kept["paper"]) / inputs < 0.75


@pytest.mark.parametrize("on_cpu", [True, False])
def test_only_a_gpu_has_seconds(on_cpu):
    args = train.parse(["--accelerator=cpu", "--preset", "max"])
    args.on_cpu = on_cpu
    row = {"method": "dense", "test_acc": 0.5, "activation_bytes": 3 * 2**20, "peak_bytes": 7 * 2**19, "seconds": 1.0}
    table = train.make_table([row], args)
    cells = ["dense", "50.00%", "3.00 (100%)", "3.50 (100%)"]
    assert [list(column.cells) for column in table.columns] == [
        [cell] for cell in (cells if on_cpu else [*cells, "1.0"])
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--sparsity 1", "`sparsity`"),
        ("--block-size 4", "`block_size`"),
        ("--epochs 0", "--epochs"),
        ("--patch-size 3", "`patch_size`"),
        ("--rules [1]", "--rules"),
        ('--rules {"*.fc3":"dense"}', r"*.fc3"),
        ("--preset maxi", "maxi"),
        ("--accelerator abacus", "abacus"),
        ("--dataset folder --root nowhere", "nowhere"),
    ],
)
def test_a_bad_argument_ends_train_before_any_training(arguments, named, capsys, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("a training began"))
    with pytest.raises(SystemExit) as end:
        train.main(arguments.split())
    assert end.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.integration
def test_the_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(Path(train.__file__)), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "--preset" in shown
