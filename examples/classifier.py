"""The image classifier that the examples train: a ResMLP, ViT or ResNet, cross-entropy, AdamW, a cosine learning rate.

Over `n` optimizer steps of which the first `w = warmup * n` warm up, step `i` runs at::

    lr * (i + 1) / (w + 1)                              while i < w
    lr * (1 + cos(pi * (i - w) / (n - w))) / 2          then, down to zero
"""

from __future__ import annotations

import math

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from examples.models import build_model


class ImageClassifier(L.LightningModule):
    """A ResMLP, ViT or ResNet classifier.

    Args:
        model: Name of the model: `resmlp_tiny`, `resmlp_s12`, `resmlp_s24`, `resmlp_s36`, `resmlp_b24`, `vit_8x384` or
            `resnet_9x64`.
        image_size: Height and width of the images.
        patch_size: Height and width of a patch; of a ResNet, the stride of its first convolution.
        dim: Number of channels, in place of the model's.
        depth: Number of blocks, in place of the model's.
        num_classes: Number of classes.
        channels: Channels of the images.
        lr: Highest learning rate.
        weight_decay: Weight decay of the weight matrices; scales, shifts and biases have none.
        warmup: Fraction of the steps over which the learning rate rises.
        label_smoothing: Label smoothing of the training loss.
    """

    def __init__(
        self,
        model: str = "resmlp_s12",
        image_size: int = 32,
        patch_size: int = 4,
        dim: int | None = None,
        depth: int | None = None,
        num_classes: int = 10,
        channels: int = 3,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.05,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        size = {name: value for name, value in (("dim", dim), ("depth", depth)) if value is not None}
        shape = {"image_size": image_size, "patch_size": patch_size, "in_channels": channels}
        self.model = build_model(model, num_classes=num_classes, **shape, **size)
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of `images`."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the training loss of a batch."""
        images, labels = batch
        loss = self.loss(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of a validation batch."""
        self._evaluate(batch, "val", self.val_acc)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of a test batch."""
        self._evaluate(batch, "test", self.test_acc)

    def _evaluate(self, batch: tuple[Tensor, Tensor], part: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        scores = self(images)
        accuracy(scores, labels)
        on_epoch = {"on_epoch": True, "on_step": False, "prog_bar": True}
        self.log(f"{part}_loss", F.cross_entropy(scores, labels), batch_size=len(labels), **on_epoch)
        self.log(f"{part}_acc", accuracy, **on_epoch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with a learning rate that warms up and then falls to zero over the whole training."""
        lr, decay, warmup = self.hparams["lr"], self.hparams["weight_decay"], self.hparams["warmup"]
        optimizer = torch.optim.AdamW(parameter_groups(self.model, decay), lr=lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine_factor(step, steps, warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the matrices and filters of `model` with `weight_decay`, its vectors without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def cosine_factor(step: int, steps: int, warmup: float) -> float:
    """Return the learning rate of `step` out of `steps` as a fraction of the highest one."""
    rise = warmup * steps
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1.0, steps - rise))))
