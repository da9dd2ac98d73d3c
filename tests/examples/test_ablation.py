"""Emulated ways to store an input: what they give back, what they cost, and the commands that compare them."""

import json

import pytest
import torch
from torch import nn

from examples.benchmarks import ablation, ablation_page, tables
from examples.benchmarks.study.emulation import (
    HEADERS,
    ROUNDINGS,
    Variant,
    approximate,
    emulate,
    parse_variants,
    quantised,
    restore,
    select,
)

TINY = ["--task", "gpt", "--dim", "64", "--depth", "1", "--context", "16", "--batch-size", "4", "--limit-batches", "2"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def sources(tmp_path):
    root = tmp_path / "sources"
    root.mkdir()
    (root / "one.py").write_text("def f(x):\n    return x + 1\n" * 40)
    return root


def test_variants_are_what_is_written():
    assert parse_variants("s0.5,b64,v2,sub,h16,unbiased,rot,mean") == {
        "*": Variant(0.5, 64, 2, "sub", "h16", True, "mean", "unbiased")
    }
    assert parse_variants("fc2:s0.5/*:v3") == {"fc2": Variant(sparsity=0.5), "*": Variant(bits=3)}
    with pytest.raises(ValueError, match="got 'v'"):
        parse_variants("v")


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("v16", 16 + 1.25 / 32),
        ("v2", 3 + 1.25 / 32),
        ("v2,h16,b64", 2.25 + 1.25 / 64),
        ("s0.5,v2,sym", 1.25 + 1.25 / 32),
        ("s0.5,sign", 8 + 0.75 + 1.25 / 32),
        ("s0.5,block", 8 + 0.125 + 1.25 / 32),
    ],
)
def test_bits_are_those_of_codes_headers_positions_and_remainders(text, bits):
    assert parse_variants(text)["*"].bits_per_value == pytest.approx(bits)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rotated", [False, True])
def test_quantised_values_are_within_a_step_and_unbiased_but_to_nearest(header, rounding, rotated):
    block = torch.randn(1, 1, 32)
    variant = Variant(bits=4, rounding=rounding, header=header, rotated=rotated)
    back = quantised(block.expand(4000, 1, 32), variant)
    step = 2 * block.abs().max() / 15 * (32**0.5 if rotated else 1) * 1.2
    assert (back - block).abs().max() <= step
    bias = (back.mean(0) - block).abs().max()
    assert bias < step / 20 if rounding != "near" else back.var(0).max() == 0


def test_subtractive_dither_has_half_the_variance_of_stochastic_rounding():
    blocks = torch.randn(2000, 1, 32)
    errors = {name: (quantised(blocks, Variant(bits=3, rounding=name)) - blocks).var() for name in ROUNDINGS}
    assert errors["sub"] / errors["sr"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["unbiased", "random"])
def test_sampled_blocks_are_unbiased_and_the_largest_are_not(name):
    blocks = torch.randn(1, 16, 8) * torch.linspace(0.2, 3, 16).view(1, 16, 1)
    many = blocks.expand(20000, 16, 8)
    kept, factor = select(many, 6, name)
    assert (kept.sum(1) == 6).all()
    error = ((kept * factor * many).mean(0) - blocks[0]).norm() / blocks.norm()
    assert error < 0.05
    kept, _ = select(many, 6, "l2")
    assert ((kept * many).mean(0) - blocks[0]).norm() / blocks.norm() > 0.2


@pytest.mark.parametrize("remainder", ["zero", "mean", "block", "sign"])
@pytest.mark.parametrize("shape", [(4, 6, 50), (4, 64)])
def test_kept_blocks_stay_and_remainders_lessen_the_error(remainder, shape):
    x = torch.randn(shape) + torch.randn(shape[-1]) * 3
    back = approximate(x, Variant(sparsity=0.5, block_size=16, remainder=remainder))
    zero = approximate(x, Variant(sparsity=0.5, block_size=16))
    assert back.shape == x.shape
    assert torch.isclose(back, x, atol=1e-5).float().mean() >= 0.5
    assert (back - x).norm() <= (zero - x).norm()


def test_emulated_layers_have_the_exact_output_and_input_gradient():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(64, 8), nn.Linear(64, 8)])})
    x = torch.randn(4, 64, requires_grad=True)

    def step():
        model.zero_grad()
        y = sum(layer(x) for layer in model["blocks"])
        return y, torch.autograd.grad(y.square().sum(), [x, *model.parameters()])

    y, exact = step()
    emulate(model, {"*": Variant(sparsity=0.5)}, skipped={"blocks.1"})
    emulated_y, emulated = step()
    assert torch.equal(y, emulated_y)
    same = [torch.equal(a, b) for a, b in zip(exact, emulated, strict=True)]
    assert same == [True, False, True, True, True]  # input; weight and bias of either layer
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(exact, step()[1], strict=True))
    assert {type(layer) for layer in model["blocks"]} == {nn.Linear}


def test_command_trains_variants_and_skips_what_is_recorded(sources, tmp_path, capsys):
    out = tmp_path / "ablation.json"
    command = [*TINY, "--root", str(sources), "--epochs", "1", "--out", str(out)]
    records = ablation.main([*command, "--variants", "dense", "fc2:s0.5,v2,sub/*:v4"])
    assert [record["variant"] for record in records] == ["dense", "fc2:s0.5,v2,sub/*:v4"]
    assert records[0]["bits_per_value"] == 16
    assert 1.5 < records[1]["bits_per_value"] < 5.1
    assert all(record["accuracy"] < 0 < record["final_loss"] for record in records)
    assert ablation.main([*command, "--variants", "dense"]) == json.loads(out.read_text()) == records
    assert "already in" in capsys.readouterr().out


def test_command_compares_gradients_by_kind_of_layer(sources, tmp_path, capsys):
    out = tmp_path / "fidelity.json"
    command = [*TINY, "--root", str(sources), "--epochs", "2", "--after", "1", "--fidelity", "--out", str(out)]
    records = ablation.main([*command, "--variants", "v8,sub", "s0.8"])
    assert [(r["variant"], r["kind"]) for r in records] == [
        (variant, kind) for variant in ("v8,sub", "s0.8") for kind in ("attn.qkv", "fc1", "fc2")
    ]
    assert all(r["cosine"] > 0.999 and r["error"] < 1e-3 for r in records[:3])
    assert all(r["cosine"] < 0.98 and r["error"] > 0.3 for r in records[3:])
    capsys.readouterr()


def test_unknown_variants_end_the_command(capsys):
    with pytest.raises(SystemExit):
        ablation.main([*TINY, "--variants", "s0.5,median"])
    assert "got 'median'" in capsys.readouterr().err


def test_page_is_generated_from_the_committed_records():
    accuracy, fidelity, start = map(tables.load, ablation_page.FILES)
    text = ablation_page.page(accuracy, fidelity, start)
    assert ablation_page.PAGE.read_text() == text
    assert all(f"`{record['variant']}`" in text for record in accuracy + fidelity)
