"""Marks: the identity, by themselves and where nobody packs."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.compiled.marks import Mark, Model, general_name, marked

TEXT = Mark("linear", "fc", 4, selection="swap", model=Model(saved=8, value=4)).text


@pytest.mark.parametrize("layout", ["contiguous", "turned", "with gaps"])
def test_a_mark_is_the_identity(layout):
    x = torch.randn(6, 8, requires_grad=True)
    read = {"contiguous": x, "turned": x.t(), "with gaps": x[:, 2:6]}[layout]
    y = marked(read, TEXT)
    assert torch.equal(y, read)
    assert y.stride() == read.stride()
    (y * 3).sum().backward()
    assert torch.equal(
        x.grad,
        torch.full_like(x, 3.0)
        if layout != "with gaps"
        else torch.where(torch.arange(8) // 2 % 3 > 0, 3.0, 0.0).expand(6, 8),
    )


def test_what_has_no_values_of_its_own_is_not_marked():
    for x in (torch.ones(1, 4).expand(3, 4), torch.ones(3, dtype=torch.int64)):
        assert marked(x, TEXT) is x


def test_a_mark_says_what_it_was_told():
    assert Mark.read(TEXT) == Mark("linear", "fc", 4, selection="swap", model=Model(saved=8, value=4))
    assert general_name("model.layers.3.mlp") == general_name("model.layers.11.mlp")


def test_the_compiler_is_told_the_truth():
    torch.library.opcheck(torch.ops.actprune.mark.default, (torch.randn(24), TEXT))
