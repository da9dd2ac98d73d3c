"""Compressed activations with Lightning Fabric, on scikit-learn's digits.

    python examples/fabric.py

As in `plain_loop.py`, which explains the watch. `convert` gets the model before `fabric.setup` wraps it, so that the
names of layers are the model's own. Fabric's precision, strategy and devices stay what they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.data import ImageData
from examples.models import build_model
from lightning_actprune import convert, revert
from lightning_actprune.analysis.first_forwards import FirstForwards


def train(fabric: Fabric, net: nn.Module, data: ImageData, epochs: int) -> list[float]:
    """Train `net` with compressed activations and return its losses; afterwards it is the plain model again."""
    report, losses = convert(net, "max"), []
    watch = FirstForwards(net, report)
    try:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(data.train_dataloader())
        for epoch in range(1, epochs + 1):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            fabric.print(f"Epoch {epoch} of {epochs}: loss {losses[-1]:.3f}", flush=True)
        fabric.print(report, watch.memory, sep="\n")
    finally:
        revert(net)
    return losses


def main(epochs: int = 3, accelerator: str = "auto", precision: str = "bf16-mixed") -> tuple[nn.Module, list[float]]:
    """Train a small ResMLP and return it with its losses."""
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    data = ImageData()
    data.setup("fit")
    net = build_model("resmlp_tiny", dim=64, depth=2, image_size=8, patch_size=2, in_channels=1, num_classes=10)
    return net, train(fabric, net, data, epochs)


if __name__ == "__main__":
    main()
