"""Compressed activations in a plain PyTorch loop, on scikit-learn's digits.

    python examples/plain_loop.py

`convert` before the loop, `revert` after it, also after an exception. `FirstForwards` watches two forwards: a layer
whose input is kept anyway, by the batch or by another layer, would only add a copy, so it becomes dense after the
first. What the model keeps is counted in the second. `ActivationPruning` does all this in a Trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.data import ImageData
from lightning_actprune import convert, revert
from lightning_actprune.analysis.first_forwards import FirstForwards


def train(model: nn.Module, loader: DataLoader, epochs: int, device: torch.device) -> list[float]:
    """Train `model` with compressed activations and return its losses; afterwards it is the plain model again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # before or after `convert`: parameters stay the same
    report, losses = convert(model, "max"), []
    watch = FirstForwards(model, report)
    try:
        for epoch in range(1, epochs + 1):
            for images, labels in loader:
                images, labels = images.to(device), labels.to(device)
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"Epoch {epoch} of {epochs}: loss {losses[-1]:.3f}", flush=True)
        print(report, watch.memory, sep="\n")
    finally:
        revert(model)
    return losses


def main(epochs: int = 3) -> tuple[nn.Module, list[float]]:
    """Train a small MLP and return it with its losses."""
    torch.manual_seed(0)
    data, device = ImageData(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data.setup("fit")
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    model = nn.Sequential(nn.Flatten(), *layers).to(device)
    return model, train(model, data.train_dataloader(), epochs, device)


if __name__ == "__main__":
    main()
