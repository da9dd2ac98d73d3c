"""The source text of Python's standard library as bytes on one device: what the GPT learns to continue.

It is there wherever Python is, so nothing is downloaded; but it differs from one Python to the next, and so a record
states how many bytes there were and their hash. Packages that somebody installed do not belong to it.

For long trainings there is more of it: all text that the installed packages ship, sources, headers and documentation.
Each file is taken once, whatever it is called, in the order of the files' hashes, so that the last tenth is of all
packages.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

EPOCH_BATCHES = 75
"""What is called an epoch: windows are drawn at random, so any number would do. 20 epochs are 1500 steps."""
VALIDATION_SHARE = 0.1
VALIDATION_WINDOWS = 2048
INSTALLED = {"site-packages", "dist-packages"}
SUFFIXES = {
    *(".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".html", ".js", ".css"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"),
}
"""Of files of text."""
LONGEST = 2_000_000
"""Bytes; longer files are data."""


class Text:
    """Bytes of training text and a fixed set of windows of validation text, the last tenth.

    Args:
        root: Folder of Python sources; by default the standard library's.
        device: Where the tensors live.
        context: Bytes that the model sees at a time; a window has one more.
        packages: Text to take in place of the sources, that of `packages_text`.
    """

    def __init__(self, root: Path | None, device: torch.device, context: int, packages: bytes | None = None) -> None:
        text = read_sources(root or Path(sysconfig.get_paths()["stdlib"])) if packages is None else packages
        known = "packages" if packages is not None else f"stdlib-{platform.python_version()}"
        self.device = device
        self.facts = {
            "dataset": "text" if root else known,
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest()[:16],
        }
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        held_out = int(VALIDATION_SHARE * len(data))
        train, validation = data.split([len(data) - held_out, held_out])
        if held_out < context + 1:
            raise ValueError(
                f"`--root` must hold more than {10 * (context + 1)} bytes of *.py files for a context of {context}, "
                f"got {len(text)}. HINT: leave it out to take the standard library, or lower `--context`."
            )
        count = min(VALIDATION_WINDOWS, held_out // (context + 1))
        starts = torch.arange(count) * (held_out // count)
        offsets = torch.arange(context + 1)
        self.windows = validation[starts[:, None] + offsets].to(device)
        self.train, self.offsets = train.to(device), offsets.to(device)

    @property
    def shape(self) -> dict[str, int]:
        """What a model must know of the data: nothing, a byte is a byte."""
        return {}

    def epoch_batches(self, batch: int) -> int:
        """Return the number of batches that are called an epoch."""
        return EPOCH_BATCHES

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return where the windows of an epoch start, `[steps, batch]`."""
        last = len(self.train) - len(self.offsets)
        return torch.randint(last + 1, (steps, batch), generator=generator).to(self.device)

    def batch(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of the windows that start at `choices` (`[batch]`), and the bytes that follow them."""
        windows = self.train[choices.unsqueeze(-1) + self.offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def score(self, model: Callable[[Tensor], Tensor], limit: int | None) -> float:
        """Return the negative loss per byte over the validation windows, the first `limit` of them if given."""
        losses = []
        for windows in self.windows[:limit].long().split(64):
            scores = model(windows[:, :-1]).float().flatten(0, 1)
            losses.append(F.cross_entropy(scores, windows[:, 1:].flatten(), reduction="none"))
        return -torch.cat(losses).mean().item()


def read_sources(root: Path) -> bytes:
    """Return the Python sources below `root`, one after the other, sorted by their path."""
    files = {path.relative_to(root): path for path in root.rglob("*.py") if path.is_file()}
    names = sorted((name for name in files if not INSTALLED & set(name.parts)), key=Path.as_posix)
    return b"".join(files[name].read_bytes() for name in names)


@cache
def packages_text() -> bytes:
    """Return the text that the installed packages ship, each file once, in the order of their hashes."""
    found = {}
    for package in importlib.metadata.distributions():
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if path.suffix.lower() in SUFFIXES and path.is_file() and path.stat().st_size <= LONGEST:
                content = path.read_bytes()
                found[hashlib.sha256(content).digest()] = content
    return b"".join(content for _, content in sorted(found.items()))
