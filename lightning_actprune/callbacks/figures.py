"""The pictures of ``ActivationMemoryMonitor``: made, given to the loggers that take figures, and written to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from lightning_actprune.callbacks.loggers import loggers, step
from lightning_actprune.footprint import MemoryReport
from lightning_actprune.pictures import check_matplotlib, epochs_picture, layers_picture, step_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150


def check_figures(trainer: pl.Trainer) -> None:
    """Find out before the training what would keep the loggers from getting pictures.

    Raises:
        MisconfigurationException: If matplotlib is missing.
    """
    try:
        check_matplotlib()
    except ImportError as error:
        raise MisconfigurationException(f"`log_figures=True` does not work: {error}") from error
    taking = (TensorBoardLogger, WandbLogger, DummyLogger)  # the last stands in for all of them in a `fast_dev_run`
    if not any(isinstance(logger, taking) for logger in trainer.loggers):
        rank_zero_warn(
            f"`log_figures=True` has no effect: none of the loggers {[type(one).__name__ for one in trainer.loggers]} "
            "takes figures. HINT: use a TensorBoardLogger or a WandbLogger, or write the figures to files after the "
            "fit with `monitor.save_figures(folder)`."
        )


def log_figures(trainer: pl.Trainer, report: MemoryReport, history: Sequence[Mapping[str, Any]]) -> None:
    """Give the pictures of the layers and of the epochs to the loggers that take figures, to W&B also a table."""
    at, made = step(trainer), _figures(report, history)
    for logger in loggers(trainer):
        if isinstance(logger, TensorBoardLogger):
            for name, figure in made.items():
                logger.experiment.add_figure(_prefixed(logger, f"actprune/{name}"), figure, global_step=at)
        elif isinstance(logger, WandbLogger):
            for name, figure in made.items():
                logger.log_image(f"actprune/{name}", [_image(figure)], step=at)
            if rows := report.to_rows():
                data = [list(row.values()) for row in rows]
                logger.log_table("actprune/layers_table", columns=list(rows[0]), data=data, step=at)


@rank_zero_only
def save_figures(report: MemoryReport, history: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the pictures of the layers, the epochs and the step, those that show anything, and return the files."""
    made = _figures(report, history)
    if report.step is not None and report.step.moments:
        made["step"] = step_picture({"Memory over the step": report.step})
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.png": figure for name, figure in made.items()}
    for path, figure in files.items():
        figure.savefig(path, dpi=_DPI)
    return list(files)


def _figures(report: MemoryReport, history: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    rows, made = report.to_rows(), {}
    if rows:
        made["layers"] = layers_picture(rows, f"Kept for backward, epoch {history[-1]['epoch']}" if history else "")
    if history:
        made["epochs"] = epochs_picture(history)
    return made


def _prefixed(logger: TensorBoardLogger, name: str) -> str:
    """Return the name as the logger's own methods write it: with the prefix that it was given."""
    return logger.LOGGER_JOIN_CHAR.join((logger._prefix, name)) if logger._prefix else name


def _image(figure: Figure) -> Any:
    """Return the figure as an image of Pillow, on which matplotlib depends.

    W&B takes a figure too, but fails where nobody has imported pyplot.
    """
    from PIL import Image

    written = BytesIO()
    figure.savefig(written, format="png", dpi=_DPI)
    return Image.open(written)
