"""The same training from YAML files and command-line options, through LightningCLI.

    python examples/cli.py fit --config examples/configs/digits.yaml
    python examples/cli.py fit --config examples/configs/digits.yaml --trainer.max_epochs 5 --model.lr 0.003
    python examples/cli.py fit --config examples/configs/digits.yaml --trainer.callbacks.preset balanced
    python examples/cli.py fit --config examples/configs/digits_paper.yaml
    python examples/cli.py fit --config examples/configs/imagenet.yaml --data.root PATH
    python examples/cli.py test --config examples/configs/digits.yaml --ckpt_path PATH

The YAML file lists the callbacks by class path. On the command line `--trainer.callbacks.NAME` changes an argument of
the last one, so `ActivationPruning` comes last. Image size, channels and number of classes of the model follow the data
set. Each run writes its whole configuration to `config.yaml` beside its logs, and `--config` reads it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.classifier import ImageClassifier
from examples.data import ImageData


class ExampleCLI(LightningCLI):
    """LightningCLI whose model takes the shape of its input and output from the data set."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the arguments of the model to the attributes of the data set."""
        for name in ("image_size", "channels", "num_classes"):
            parser.link_arguments(f"data.{name}", f"model.{name}", apply_on="instantiate")


def main(args: ArgsType = None) -> None:
    """Run the command line, or `args` instead."""
    ExampleCLI(ImageClassifier, ImageData, seed_everything_default=0, args=args)


if __name__ == "__main__":
    main()
