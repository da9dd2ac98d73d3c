"""Fidelity of weight gradients: what is compared, what is left out, and what is recorded."""

import json

import pytest
import torch

from examples.benchmarks import fidelity
from examples.benchmarks.study import results, tasks
from examples.benchmarks.study.settings import parse_setting
from examples.models import build_model

SIZE = ["--dim", "64", "--depth", "2", "--epochs", "3", "--after", "1", "--batch-size", "6", "--limit-batches", "2"]
KINDS = {
    "resmlp": ["token_mix", "fc1", "fc2"],
    "vit": ["attn.qkv", "fc1", "fc2"],
    "resnet": ["conv1", "conv2", "shortcut"],
    "gpt": ["attn.qkv", "fc1", "fc2"],
}


def test_gradients_are_compared_by_direction_and_length():
    x, y = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    assert fidelity.compare(x, 0.5 * x) == pytest.approx((1, 0.5))
    assert fidelity.compare(x, -2 * x) == pytest.approx((-1, 2))
    assert fidelity.compare(x, y) == pytest.approx((0, 2 / 3))


def test_measuring_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = build_model("vit_8x384", dim=64, depth=1, image_size=8, patch_size=2)
    torch.nn.init.normal_(model.head.weight)
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, half = (fidelity.measure(model, parse_setting(text), batch, "fp32") for text in ("0:8:same", "0.5:8:same"))
    assert [r["kind"] for r in half] == ["attn.qkv", "fc1", "fc2"]
    assert all(r["cosine"] == r["norm_ratio"] == 1 for r in whole)
    assert all(0.5 < r["cosine"] < 0.999 for r in half)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_command_records_every_kind_once(task, image_folder, tmp_path, capsys):
    root = tmp_path / "sources"
    root.mkdir()
    (root / "one.py").write_text("def f(x):\n    return x + 1\n" * 40)
    out = tmp_path / "fidelity.json"
    root = root if task == "gpt" else image_folder
    command = ["--task", task, "--root", str(root), "--out", str(out), *SIZE, "--patch-size", "2", "--context", "16"]
    records = fidelity.main([*command, "--settings", "dense", "0.5:8:same", "0.8:8:same"])
    assert json.loads(out.read_text()) == records
    assert [r["kind"] for r in records] == KINDS[task] * 2
    # Where a stage begins, conv1 shares what the shortcut has packed, and has no byte of its own.
    layers = [1, 2, 1] if task == "resnet" else [2, 2, 2]
    assert [r["layers"] for r in records] == layers * 2
    for low, high in zip(records[:3], records[3:], strict=True):
        assert (low["sparsity"], high["sparsity"]) == (0.5, 0.8)
        assert 1 > low["cosine"] > high["cosine"] > 0
        assert 16 > low["bits_per_value"] > high["bits_per_value"] > 0
        assert {"task", "model", "value_format", "norm_ratio", "after", "seed", "gpu", "command"} <= low.keys()
    assert len(results.fidelity(records).rows) == 6
    capsys.readouterr()
    assert fidelity.main([*command, "--settings", "0.8:8:same"]) == records
    assert "epoch" not in capsys.readouterr().out
