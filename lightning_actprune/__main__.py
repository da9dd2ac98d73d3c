"""``python -m lightning_actprune``: versions, GPUs and where the kernels run (``commands.environment``).

``python -m lightning_actprune estimate MODEL``: what each preset would save of a model (``commands.estimate``).

Torch takes seconds to import, so this module does without it, and ``--help`` is there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

_DESCRIPTION = "Show versions, GPUs and where the kernels run."
_ESTIMATE = "Show what each preset would save of a model, without computing anything and without a GPU."


def main(argv: Sequence[str] | None = None) -> int:
    """Print the environment, whatever is missing, or an estimate; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lightning_actprune", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    _add_estimate(parser.add_subparsers(dest="command", title="commands"))
    args = parser.parse_args(argv)
    if args.command == "estimate":
        from lightning_actprune.commands.estimate import show_estimate

        return show_estimate(args)
    from lightning_actprune.commands.environment import show_environment

    return show_environment(args.json)


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser("estimate", help=_ESTIMATE, description=_ESTIMATE)
    parser.add_argument("model", help="timm:NAME, hf:TYPE, hf:ID, hf:PATH or MODULE:ATTRIBUTE")
    parser.add_argument("--batch", type=int, default=32, metavar="SAMPLES", help="samples of a step (default: 32)")
    parser.add_argument("--length", type=int, default=1024, metavar="TOKENS", help="of a text (default: 1024)")
    parser.add_argument("--shape", type=_parse_shape, metavar="3,224,224", help="of an input of MODULE:ATTRIBUTE")
    parser.add_argument("--precision", default="bf16-mixed", help="a name of Lightning's (default: bf16-mixed)")
    parser.add_argument("--memory", metavar="24GiB", help="of a GPU; shows what fits, and the largest batches")
    parser.add_argument(
        "--presets", nargs="+", metavar="PRESET", help="rows, also dense and checkpoint (default: all but paper)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def _parse_shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


if __name__ == "__main__":
    sys.exit(main())
