"""The error of the gradient from few bits, predicted and actual, and the bytes that are kept.

    python benchmarks/errors.py --quick
    python benchmarks/errors.py

Each model is small and runs on a CPU, at the start and after some steps of training on one batch. Settings are:

- two, three and four bits for all linear layers and convolutions, with all other operators dense, as
  ``measure_sensitivity`` predicts their error;
- presets, and the bits that ``ActivationPruning(max_error=...)`` would choose, as a second backward and the layers'
  own formula predict their error in one step.

Each error is relative to the gradient's own norm, and the error of all is the root of the mean of squares over all
values. Bytes are relative to those that the dense model keeps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Record, RecordFile, environment, parser_for, show
from lightning_actprune import Keep, convert, measure_sensitivity, revert
from lightning_actprune.analysis.measured_bits import choose_bits
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.analysis.second_backward import SecondBackward, mean_square
from lightning_actprune.config import Config

KEYS = "model", "steps", "setting"
FIGURES = "bits", "predicted", "actual", "kept"
STEPS = 0, 20
EQUAL, PRESETS, BOUNDS = (2, 3, 4), ("max", "balanced"), (0.2, 0.1)
LLM = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**LLM, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "intermediate_size": 512, "num_local_experts": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BERT = {**LLM, **TOKENS, "intermediate_size": 384}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {**DROPOUT, "vocab_size": 1000, "n_embd": 256, "n_layer": 4, "n_head": 4}
MAMBA = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2}
T5 = {"vocab_size": 1000, "d_model": 256, "d_ff": 768, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
OPT = {**LLM, "ffn_dim": 768, "word_embed_proj_dim": 256}
GEMMA = {**GROUPED, "intermediate_size": 768, "head_dim": 64}


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
    "Llama": (partial(_transformers, "LlamaForCausalLM", "LlamaConfig", intermediate_size=768, **GROUPED), None),
    "Gemma 2": (partial(_transformers, "Gemma2ForCausalLM", "Gemma2Config", **GEMMA), None),
    "GPT-NeoX": (partial(_transformers, "GPTNeoXForCausalLM", "GPTNeoXConfig", intermediate_size=768, **LLM), None),
    "OPT": (partial(_transformers, "OPTForCausalLM", "OPTConfig", **OPT), None),
    "BERT": (partial(_transformers, "BertForMaskedLM", "BertConfig", **{**LLM, "intermediate_size": 768}), None),
    "T5": (partial(_transformers, "T5ForConditionalGeneration", "T5Config", **T5), None),
    "ViT": (partial(_timm, "vit_tiny_patch16_224", depth=6), 224),
    "ConvNeXt": (partial(_timm, "convnext_atto"), 96),
    "ResNet-18": (partial(_timm, "resnet18"), 96),
    "Swin": (partial(_timm, "swin_tiny_patch4_window7_224", depths=(2, 2, 2, 2), embed_dim=48), 224),
    "MLP-Mixer": (partial(_timm, "mixer_s32_224"), 224),
    "EfficientNet": (partial(_timm, "efficientnet_b0"), 96),
    "MobileNetV3": (partial(_timm, "mobilenetv3_small_075"), 96),
    "RegNet": (partial(_timm, "regnetx_002"), 96),
}
"""How a model is built, and the pixels of its images; ``None`` for one that reads tokens."""


class Study:
    """A model after some steps, and its exact gradient."""

    def __init__(self, name: str, steps: int) -> None:
        torch.manual_seed(0)
        build, pixels = MODELS[name]
        self.model = build().train()
        if pixels is None:
            tokens = torch.randint(3, 1000, (16, 64))
            self.loss: Callable[[Any], Tensor] = lambda _: self.model(input_ids=tokens, labels=tokens).loss
        else:
            images, labels = torch.randn(16, 3, pixels, pixels), torch.randint(10, (16,))
            self.loss = lambda _: F.cross_entropy(self.model(images), labels)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(None).backward()
            optimizer.step()
        self._exact = self._gradients(self._forward())

    def of_equal_bits(self, bits: int) -> Record:
        """Return the figures of the weight gradients if all linear layers and convolutions keep ``bits`` bits."""
        rows = [row for row in measure_sensitivity(self.model, self.loss, [None]).rows if row.bits == bits]
        rules: dict[str, Keep | None] = {row.fqn: Keep(bits, min_rows_for_low_bits=0) for row in rows}
        convert(self.model, rules={**rules, "*": None})
        predicted = math.sqrt(math.fsum(row.share**2 for row in rows))
        return _figures(bits, predicted, self._compare()[0], None)

    def of_preset(self, preset: Any) -> Record:
        """Return the figures of the whole gradient with a preset."""
        convert(self.model, preset)
        loss = self._forward()
        with SecondBackward(loss) as second:
            loss.backward()
        return _figures(None, second.relative_error(self.model.parameters()), *self._compare())

    def of_bound(self, bound: float) -> Record:
        """Return the figures of the whole gradient with the bits that a bound leads to."""
        choice = choose_bits(self.model, lambda: self.loss(None), bound, seed=1)
        convert(self.model, "max", rules=choice.rules(Config("max")))
        return {**_figures(choice.average, choice.error, *self._compare()), "operators": choice.operators}

    def _forward(self) -> Tensor:
        self.model.zero_grad()
        torch.manual_seed(1)
        return self.loss(None)

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        named = self.model.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}

    def _compare(self) -> tuple[float, float]:
        """Return the error of the converted model's gradient, and what part of the bytes it keeps; revert it."""
        with SavedTensorMeter(self.model) as meter:
            loss = self._forward()
        report, ours = meter.report(), self._gradients(loss)
        revert(self.model)
        error = mean_square(squares_of(exact, ours[name]) for name, exact in self._exact.items())
        return math.sqrt(error), report.stored_bytes / report.dense_bytes


def squares_of(exact: Tensor, ours: Tensor) -> tuple[int, float, float]:
    """Return the number of values of a gradient, its squared norm, and that of its error."""
    return exact.numel(), float(exact.double().square().sum()), float((ours - exact).double().square().sum())


def _figures(*figures: float | None) -> Record:
    return dict(zip(FIGURES, (figure and round(figure, 4) for figure in figures), strict=True))


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
            settings: dict[str, Callable[[Study], Record]] = {
                **{f"{bits} bits": partial(Study.of_equal_bits, bits=bits) for bits in EQUAL},
                **{preset: partial(Study.of_preset, preset=preset) for preset in PRESETS},
                **{f"error of {bound}": partial(Study.of_bound, bound=bound) for bound in BOUNDS},
            }
            settings = {name: of for name, of in settings.items() if records.lacks({**head, "setting": name})}
            study = Study(name, count) if settings else None
            for setting, measure in settings.items():
                records.add({**head, "setting": setting, **measure(study), **environment()})
    show("Errors of weight gradients", list(records.records.values()), [*KEYS, *FIGURES])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
