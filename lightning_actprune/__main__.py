"""The command line of the package.

- ``python -m lightning_actprune`` shows whether the kernels run here, versions and GPUs (``commands.environment``).
- ``python -m lightning_actprune estimate MODEL`` estimates how much memory each preset saves (``commands.estimate``).

This module does not import torch, which takes seconds, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

_DESCRIPTION = "Show whether the kernels run on this machine, and why not, with versions and GPUs."
_JSON = "print JSON instead of tables"
_ESTIMATE = "Estimate how much memory each preset saves for a model, and what fits in a GPU. No GPU is needed."
_MODELS = """\
MODEL is one of
  timm:NAME         a model of timm
  hf:TYPE           a type of model in transformers, such as gpt2
  hf:ID             a model on the Hugging Face hub; only its configuration is loaded
  hf:PATH           the folder of a config.json
  MODULE:ATTRIBUTE  a module of yours, or a function that returns a module, or a module and a batch

examples:
  python -m lightning_actprune estimate timm:vit_base_patch16_224 --batch 128 --memory 8GiB
  python -m lightning_actprune estimate hf:gpt2 --batch 16 --length 1024
  python -m lightning_actprune estimate mine.models:net --shape 3,32,32
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m lightning_actprune", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help=_JSON)
    _add_estimate(parser.add_subparsers(dest="command", title="commands"))
    args = parser.parse_args(argv)
    if args.command == "estimate":
        from lightning_actprune.commands.estimate import show_estimate

        return show_estimate(args)
    from lightning_actprune.commands.environment import show_environment

    return show_environment(args.json)


def _add_estimate(commands: Any) -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "estimate", help=_ESTIMATE, description=_ESTIMATE, epilog=_MODELS, formatter_class=style
    )
    parser.add_argument("model", metavar="MODEL", help="the model to estimate, see below")
    parser.add_argument("--batch", type=int, default=32, metavar="SAMPLES", help="samples in a batch (default: 32)")
    parser.add_argument("--length", type=int, default=1024, metavar="TOKENS", help="tokens in a text (default: 1024)")
    parser.add_argument(
        "--shape", type=_parse_shape, metavar="SIZES", help="shape of one input sample, such as 3,224,224"
    )
    parser.add_argument("--precision", default="bf16-mixed", help="as in a Lightning Trainer (default: bf16-mixed)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a GPU, such as 24GiB: show what fits and the largest batches"
    )
    presets = "dense, checkpoint, balanced, max, recompute or paper (default: all but paper)"
    parser.add_argument("--presets", nargs="+", metavar="PRESET", help=f"rows to show: {presets}")
    parser.add_argument("--json", action="store_true", help=_JSON)


def _parse_shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas, such as 3,224,224, got {text!r}")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
