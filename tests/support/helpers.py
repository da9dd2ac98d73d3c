"""Small LightningModules and a quiet Trainer for the tests of the callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.data import DataLoader, TensorDataset

from lightning_actprune import ActivationPrunedLinear

FEATURES = 64
BATCHES = 4


class Net(pl.LightningModule):
    """A GELU MLP ``64 -> 128 -> 4`` on sequences, whose layers are made in ``__init__`` or a later hook.

    The norm in front keeps the first layer from reading the batch itself, which is alive anyway.
    ``seen`` collects what ``watch`` returns in every training step.
    """

    watch: Callable[[Net], Any] = staticmethod(lambda model: kinds(model))

    def __init__(self, made_in: str = "init", lr: float = 0.01, batch_size: int = 4) -> None:
        super().__init__()
        self.made_in = made_in
        self.lr = lr
        self.batch_size = batch_size
        self.seen: list[Any] = []
        self.body: nn.Module | None = None
        if made_in == "init":
            self.make()

    def make(self) -> None:
        if self.body is None:
            layers = nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, FEATURES), nn.GELU()
            self.body = nn.Sequential(*layers)
            self.head = nn.Linear(FEATURES, 4)

    def setup(self, stage: str) -> None:
        if self.made_in == "setup":
            self.make()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(nn.functional.layer_norm(x, (FEATURES,)))).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(self.watch(self))
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(BATCHES * self.batch_size, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class ConfiguredNet(Net):
    """The same with its layers made in ``configure_model``."""

    def __init__(self, lr: float = 0.01, batch_size: int = 4) -> None:
        super().__init__("configure_model", lr, batch_size)

    def configure_model(self) -> None:
        self.make()


class ByHand(Net):
    """Steps two optimizers in each batch, with backward through Lightning or past it."""

    through_lightning = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.watch(self))
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss) if self.through_lightning else loss.backward()
            self.after_backward()
            optimizer.step()

    def after_backward(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (self.body, self.head)]


def loader(samples: int, batch_size: int, tokens: int = 8) -> DataLoader[Any]:
    # On the CPU, said here: DeepSpeed's strategy asks for the data while new tensors are made on the GPU.
    generator, device = torch.Generator("cpu").manual_seed(1), "cpu"
    x = torch.randn(samples, tokens, FEATURES, generator=generator, device=device)
    y = torch.randint(4, (samples,), generator=generator, device=device)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return a Trainer for the CPU that prints and writes nothing unless told to."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
    )
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 1}
    return pl.Trainer(callbacks=list(callbacks), **(quiet | defaults | options))


def fit(
    model: pl.LightningModule, *callbacks: pl.Callback, data: Any = None, ckpt: Path | None = None, **options: Any
) -> pl.Trainer:
    """Fit ``model`` with a Trainer of these options and return it."""
    made = trainer(*callbacks, **options)
    made.fit(model, data, ckpt_path=ckpt)
    return made


def warnings_of(function: Callable[..., Any], *arguments: Any, about: str = "HINT", **options: Any) -> list[str]:
    """Call a function and return the texts of its warnings that contain ``about``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments, **options)
    return [str(warning.message) for warning in caught if about in str(warning.message)]


def kinds(model: nn.Module) -> list[str]:
    return [type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)]


def all_traces(model: nn.Module) -> dict[str, list[str]]:
    """Return by the module's name all that a conversion could have left on it: class, attributes and hooks."""
    return {name: _traces(module) for name, module in model.named_modules()}


def _traces(module: nn.Module) -> list[str]:
    hooks = [f"{name}: {len(held)}" for name, held in sorted(vars(module).items()) if name.endswith("_hooks")]
    return [type(module).__qualname__, *sorted(vars(module)), *hooks]


def pruned_layers(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, ActivationPrunedLinear)]


def sparsities(model: nn.Module) -> list[float]:
    return [m.sparsity for m in model.modules() if isinstance(m, ActivationPrunedLinear)]


def assert_plain(model: nn.Module) -> None:
    """Assert that no trace of pruning or measuring is left on ``model``."""
    untouched = vars(nn.Linear(1, 1)).keys()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert type(module) in (nn.Linear, NonDynamicallyQuantizableLinear), name
            assert vars(module).keys() == untouched, name
            assert not module._forward_hooks, name
            assert not module._forward_pre_hooks, name
