"""A whole training step waits for nothing: forward, backward and a fused optimizer, under torch's own watch."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from examples.models.resmlp import ResMLP
from examples.models.resnet import ResNet
from examples.models.vit import ViT
from lightning_actprune import convert

pytestmark = pytest.mark.gpu

BATCH, CLASSES, IMAGE = 8, 10, 64


MAKERS = {
    "resmlp": lambda: ResMLP(dim=192, depth=2, image_size=IMAGE, patch_size=8, num_classes=CLASSES),
    "vit": lambda: ViT(image_size=IMAGE, patch_size=8, dim=192, depth=2, num_classes=CLASSES),
    "resnet": lambda: ResNet(dim=32, depth=3, num_classes=CLASSES),
}


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("autocast", [True, False], ids=["bf16-autocast", "fp32"])
@pytest.mark.parametrize("name", MAKERS)
def test_training_step(name, autocast):
    model = MAKERS[name]().cuda()
    converted = convert(model, "max") if name == "resnet" else convert(model, sparsity=0.6)
    assert len(converted.converted) >= 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images, labels = torch.randn(BATCH, 3, IMAGE, IMAGE).cuda(), torch.randint(CLASSES, (BATCH,)).cuda()
    losses = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step()  # compiles kernels and makes the optimizer's state
    with waiting_is_an_error():
        step()
        step()
    first, *_, last = torch.stack(losses).tolist()
    assert last < first  # it trained: the batch is always the same


def test_the_watch_sees_a_wait():
    x = torch.ones(1, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        x.item()
