"""Running statistics of batch normalisation inside an activation checkpoint, which runs it twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import convert


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_checkpoint_moves_running_statistics_as_often_as_the_dense_layers(device, momentum):
    """Run again, it stops at the last tensor that is saved, which is the norm's."""
    dense = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, momentum=momentum)).to(device)
    ours = copy.deepcopy(dense)
    convert(ours, 0.0, value_format="int8", others={"norm": "int8"}, include=["1"])
    x = torch.randn(4, 8, 5, 5, device=device)
    for model in (dense, ours):
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert int(ours[1].num_batches_tracked) == int(dense[1].num_batches_tracked) == 2
    torch.testing.assert_close(ours[1].running_mean, dense[1].running_mean)
    torch.testing.assert_close(ours[1].running_var, dense[1].running_var)
