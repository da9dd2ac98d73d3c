"""The error of weight gradients from few bits: predicted and actual, with equal bits and with bits by their error.

    python benchmarks/errors.py --quick
    python benchmarks/errors.py

Each model is small and runs on a CPU, at the start and after some steps of training on one batch. Settings are two,
three and four bits for all linear layers and convolutions, and the fewest within a bound (``measure_sensitivity``).
``actual`` is the error of the weight gradients of these layers with all other operators dense, and ``whole`` that of
the whole gradient with the other operators as ``"max"`` keeps them, both relative to the norm of the whole gradient.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Record, RecordFile, environment, parser_for, show
from lightning_actprune import Keep, convert, measure_sensitivity, revert
from lightning_actprune.analysis.sensitivity import LayerSensitivity, SensitivityReport

KEYS = "model", "steps", "setting"
FIGURES = "predicted", "actual", "whole"
STEPS = 0, 20
EQUAL, BOUNDS = (2, 3, 4), (0.2, 0.1)
LLM = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**LLM, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "intermediate_size": 512, "num_local_experts": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BERT = {**LLM, **TOKENS, "intermediate_size": 384}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {**DROPOUT, "vocab_size": 1000, "n_embd": 256, "n_layer": 4, "n_head": 4}
MAMBA = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 3}


def _timm(name: str, **sizes: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=10, **sizes)


def _transformers(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "Qwen2": (partial(_transformers, "Qwen2ForCausalLM", "Qwen2Config", intermediate_size=768, **GROUPED), None),
    "GPT-2": (partial(_transformers, "GPT2LMHeadModel", "GPT2Config", **GPT2), None),
    "ModernBERT": (partial(_transformers, "ModernBertForMaskedLM", "ModernBertConfig", **BERT), None),
    "Mixtral": (partial(_transformers, "MixtralForCausalLM", "MixtralConfig", **EXPERTS), None),
    "Mamba": (partial(_transformers, "MambaForCausalLM", "MambaConfig", **MAMBA), None),
    "ViT": (partial(_timm, "vit_tiny_patch16_224", depth=6), 224),
    "ConvNeXt": (partial(_timm, "convnext_atto"), 96),
    "ResNet-18": (partial(_timm, "resnet18"), 96),
}
"""How a model is built, and the pixels of its images; ``None`` for one that reads tokens."""


class Study:
    """A model after some steps, its exact gradient, and the predicted errors of all settings."""

    def __init__(self, name: str, steps: int) -> None:
        torch.manual_seed(0)
        build, pixels = MODELS[name]
        self.model = build().train()
        if pixels is None:
            tokens = torch.randint(3, 1000, (16, 128))
            self.loss: Callable[[Any], Tensor] = lambda _: self.model(input_ids=tokens, labels=tokens).loss
        else:
            images, labels = torch.randn(16, 3, pixels, pixels), torch.randint(10, (16,))
            self.loss = lambda _: F.cross_entropy(self.model(images), labels)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(None).backward()
            optimizer.step()
        names = ["type:linear", "type:convolution"]
        self.found: SensitivityReport = measure_sensitivity(self.model, self.loss, [None], names=names)
        self._exact = self._gradients()

    def record(self, rows: Sequence[LayerSensitivity]) -> Record:
        """Return the figures of one setting for each layer."""
        values = {row.fqn: row.nbytes for row in self.found.rows if row.bits == 8}
        bits = sum((row.bits or 32) * values[row.fqn] for row in rows) / sum(values.values())
        keeps = {row.fqn: None if row.bits is None else Keep(row.bits, min_rows_for_low_bits=0) for row in rows}
        predicted = math.sqrt(math.fsum(row.share**2 for row in rows))
        actual, whole = self._error(None, {**keeps, "*": None}), self._error("max", keeps)
        return {
            "bits": round(bits, 3),
            **{k: round(v, 4) for k, v in zip(FIGURES, (predicted, actual, whole), strict=True)},
        }

    def _error(self, preset: Any, rules: Mapping[str, Keep | None]) -> float:
        convert(self.model, preset, rules=rules)
        ours = self._gradients()
        revert(self.model)
        error = sum((ours[name] - exact).square().sum() for name, exact in self._exact.items())
        return math.sqrt(error / sum(exact.square().sum() for exact in self._exact.values()))

    def _gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        torch.manual_seed(1)
        self.loss(None).backward()
        named = self.model.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file lacks."""
    parser = parser_for(__doc__, "errors")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", default=list(MODELS))
    args = parser.parse_args(argv)
    models, steps = (["ResNet-18"], [0]) if args.quick else (args.models, STEPS)
    records = RecordFile(args.out, KEYS, args.again)
    for name in models:
        for count in steps:
            head = {"model": name, "steps": count}
            settings = {f"{bits} bits": bits for bits in EQUAL} | {f"error of {bound}": bound for bound in BOUNDS}
            if not any(records.lacks({**head, "setting": setting}) for setting in settings):
                continue
            study = Study(name, count)
            for setting, of in settings.items():
                rows = [row for row in study.found.rows if row.bits == of]
                rows = rows if isinstance(of, int) else list(study.found.allocate(of, min(1.0, 3 * of)).values())
                records.add({**head, "setting": setting, **study.record(rows), **environment()})
    show("Errors of weight gradients", list(records.records.values()), [*KEYS, "bits", *FIGURES])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
