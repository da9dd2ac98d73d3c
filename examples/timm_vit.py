"""Train a ViT of timm with Lightning, and see what backward keeps.

    pip install timm scikit-learn
    python examples/timm_vit.py

The only line that this package needs is the callback; the monitor shows memory before and after.
"""

from __future__ import annotations

import lightning as L
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning


class Classifier(L.LightningModule):
    """A ViT for images of 8 x 8 pixels. With `pretrained=True` in place of the options it is a published one."""

    def __init__(self) -> None:
        super().__init__()
        small = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 3, "num_heads": 2}
        pooled = {"global_pool": "avg", "class_token": False}
        self.vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, weight_init="jax", **small, **pooled)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.vit(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_acc", (self.vit(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(epochs: int = 4, limit_train_batches: int | None = None) -> L.Trainer:
    """Train on scikit-learn's digits and return the Trainer."""
    L.seed_everything(0, verbose=False)
    digits = load_digits()
    images = (torch.from_numpy(digits.images).float().unsqueeze(1) - 4.9) / 6.0
    data = TensorDataset(images, torch.from_numpy(digits.target))
    train_set, val_set = torch.utils.data.random_split(data, [0.8, 0.2])
    trainer = L.Trainer(
        max_epochs=epochs,
        limit_train_batches=limit_train_batches,
        callbacks=[ActivationPruning("max"), ActivationMemoryMonitor()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(train_set, batch_size=64, shuffle=True), DataLoader(val_set, batch_size=360))
    print(f"Validation accuracy: {trainer.callback_metrics['val_acc']:.1%}")
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)  # this model is too small for more
    main()
