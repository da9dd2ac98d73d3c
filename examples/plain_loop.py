"""Pruning in a plain PyTorch loop, on scikit-learn's digits.

    python examples/plain_loop.py

`convert` before the loop, `revert` after it, also after an exception. `RetentionProbe` looks at the first forward: it
finds the layers whose input something else keeps anyway, and turns them back. A Trainer with `ActivationPruning` does
that by itself.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.data import ImageData
from lightning_actprune import convert, revert
from lightning_actprune.analysis.first_batch import RetentionProbe


def train(model: nn.Module, loader: DataLoader, epochs: int, device: torch.device) -> list[float]:
    """Train `model` with pruned activations and return its losses; it is the plain model again afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # before or after `convert`: parameters stay the same
    report, losses = convert(model, "max"), []
    try:
        for epoch in range(1, epochs + 1):
            before, start = len(losses), time.perf_counter()
            for images, labels in loader:
                images, labels = images.to(device), labels.to(device)
                with nullcontext() if losses else RetentionProbe(model, images) as first:
                    loss = nn.functional.cross_entropy(model(images), labels)
                for layer in first.apply(report) if first else ():
                    print(f"Layer {layer.fqn} stays dense: {layer.reason}.")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            of_epoch = losses[before:]
            mean, seconds = sum(of_epoch) / len(of_epoch), time.perf_counter() - start
            print(f"Epoch {epoch} of {epochs}: mean loss {mean:.3f}, {seconds:.1f} s.", flush=True)
    finally:
        revert(model)
    return losses


def main(epochs: int = 5) -> tuple[nn.Module, list[float]]:
    """Train a small MLP and return it with its losses."""
    torch.manual_seed(0)
    data, device = ImageData(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data.setup("fit")
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    model = nn.Sequential(nn.Flatten(), *layers).to(device)
    losses = train(model, data.train_dataloader(), epochs, device)
    print(f"Loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end.")
    return model, losses


if __name__ == "__main__":
    main()
