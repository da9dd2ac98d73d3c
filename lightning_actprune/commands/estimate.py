"""Show what each preset would save of a model, and what fits in a GPU (``analysis.estimate``).

A model is ``timm:NAME``, ``hf:TYPE``, ``hf:ID`` on the hub, ``hf:PATH`` of a configuration, or ``MODULE:ATTRIBUTE``:
a module, or a callable that returns a module or a pair of module and batch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from rich.text import Text
from torch import nn

import lightning_actprune
from lightning_actprune.analysis.allocation import check_memory_budget
from lightning_actprune.analysis.estimate import DENSE, METHODS, Estimate, check_methods, estimate
from lightning_actprune.analysis.simulate_step import check_precision
from lightning_actprune.commands.console import format_error, make_console
from lightning_actprune.report import GIB

_LEAST_COMPRESSED_FIRST = DENSE, "balanced", "max", "recompute"
_CALLBACK = 'callbacks=[ActivationPruning("{}")]'
_TASKS = {
    "SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "MaskedLM": "MASKED_LM",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
    "TokenClassification": "TOKEN_CLASSIFICATION",
    "QuestionAnswering": "QUESTION_ANSWERING",
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "VideoClassification": "VIDEO_CLASSIFICATION",
    "SemanticSegmentation": "SEMANTIC_SEGMENTATION",
    "AudioClassification": "AUDIO_CLASSIFICATION",
}
"""Endings of transformers' ``AutoModelFor`` classes, with the middles of the names of what they cover."""
_SOUND = 160_000
"""Values of a sound: ten seconds of 16 kHz."""


def show_estimate(args: argparse.Namespace) -> int:
    """Print an estimate, or an error about the model or an option; return the exit code."""
    try:
        check_precision(args.precision)
        methods = check_methods(args.presets or [name for name in METHODS if name != "paper"])
        memory = None if args.memory is None else _parse_memory(args.memory)
        model, batch = load_model(args)
        result = estimate(model, batch, precision=args.precision, presets=methods, memory=memory)
    except (ImportError, TypeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if args.json:
        sys.stdout.write(json.dumps(result.to_rows(), indent=2) + "\n")
        return 0
    console = make_console()
    console.print(result.rich())
    console.print(Text(_describe_step(args, batch)))
    if memory is not None:
        console.print(Text(_describe_fit(result, memory)))
    return 0


def _describe_step(args: argparse.Namespace, batch: Any) -> str:
    """Return a sentence on what was assumed."""
    tensors = batch if isinstance(batch, tuple) else (batch,)
    pairs = batch.items() if isinstance(batch, dict) else [("", tensor) for tensor in tensors]
    shapes = [f"{name} {[*value.shape]}".lstrip() for name, value in pairs if isinstance(value, torch.Tensor)]
    return (
        f"Assumed: {args.precision}, fused AdamW on all trained parameters, a batch of {', '.join(shapes)}. Columns to "
        "the right of the peak say what is in use at that moment."
    )


def _describe_fit(result: Estimate, memory: int) -> str:
    """Return which rows fit in a GPU, and that of them which compresses the least."""
    peaks = {row.method: row.peak_bytes for row in result.rows if row.peak_bytes is not None}
    answers = [f"{method} {'yes' if peak <= memory else 'no'}" for method, peak in peaks.items()]
    text = f"Fits in {memory / GIB:.3g} GiB: {', '.join(answers)}."
    fitting = next((name for name in _LEAST_COMPRESSED_FIRST if peaks.get(name, math.inf) <= memory), None)
    if fitting is None:
        largest = {name: result[name].largest_batch or 0 for name in _LEAST_COMPRESSED_FIRST if name in peaks}
        best = max(largest, key=largest.__getitem__, default=DENSE)
        if not largest.get(best):
            return f"{text} Nothing does, whatever the batch."
        advice = f"a batch of at most {largest[best]:,} samples"
        return f"{text} Nothing does. Take {advice}{'' if best == DENSE else f' and {_CALLBACK.format(best)}'}."
    if fitting == DENSE:
        return f"{text} Nothing has to be compressed."
    return f"{text} Use {_CALLBACK.format(fitting)}."


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the model that was named, and a batch for it, both without values."""
    source, _, name = args.model.partition(":")
    if args.batch < 1 or args.length < 1:
        raise ValueError(f"--batch and --length must be 1 or more, got {args.batch} and {args.length}.")
    if not name:
        raise ValueError(
            f"The model must be timm:NAME, hf:TYPE, hf:ID, hf:PATH or MODULE:ATTRIBUTE, got {args.model!r}. HINT: for "
            "example timm:vit_base_patch16_224, hf:gpt2 or mine.models:build."
        )
    if source == "timm":
        model: Any = _load_timm(name)
        return model, _make_images(args.batch, args.shape or tuple(model.pretrained_cfg["input_size"]))
    if source == "hf":
        return _load_hugging_face(name, args)
    value = _load_attribute(source, name)
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if not isinstance(value, nn.Module) or args.shape is None:
        raise ValueError(
            f"{args.model!r} must be a module, with --shape of an input, or a callable that returns (model, batch), "
            f"got {type(value).__name__} and --shape {args.shape}. HINT: for example --shape 3,224,224."
        )
    return value, _make_images(args.batch, args.shape)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"This model needs {package}, which is not installed. HINT: pip install {package}") from error


def _load_attribute(module: str, name: str) -> Any:
    """Return an attribute of a user module, or its result if it is callable."""
    if not hasattr(lightning_actprune, "ActivationPruning"):  # the package left its names out to start fast
        importlib.reload(lightning_actprune)
    try:
        value = getattr(importlib.import_module(module), name)
        return value() if callable(value) and not isinstance(value, nn.Module) else value
    except Exception as error:  # any error of the user's code
        raise ValueError(
            f"{module}:{name} raised {type(error).__name__}: {error}. HINT: run it in Python to see where."
        ) from error


def _load_timm(name: str) -> nn.Module:
    timm = _import("timm")
    try:
        try:
            with torch.device("meta"):
                return cast(nn.Module, timm.create_model(name))
        except Exception:  # a few models read values while they are built
            return cast(nn.Module, timm.create_model(name))
    except Exception as error:  # RuntimeErrors, and those of downloads
        near = _suggest(name, [*timm.list_models(), *timm.list_pretrained()])
        raise ValueError(f"timm has no model {name!r} ({format_error(error)}){near}") from error


def _load_hugging_face(name: str, args: argparse.Namespace) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model of this type, or of the configuration at this path or hub name, and a batch."""
    transformers = _import("transformers")
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    try:
        if name in types and not os.path.exists(name):  # noqa: PTH110  # any name may be a path
            config = transformers.AutoConfig.for_model(name)
        else:
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each attempt
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # no network, no access, or no such name
        raise ValueError(
            f"transformers has no model type {name!r}, and no configuration of that name could be loaded "
            f"({format_error(error)}){_suggest(name, types)} HINT: without a network, give a type (hf:llama) or the "
            "folder of a config.json; models with restricted access need a token (HF_TOKEN)."
        ) from error
    config.use_cache = False
    task = _find_task(config)
    if task is None:
        raise ValueError(
            f"hf:{name} is of type {config.model_type!r}, which transformers trains for none of {', '.join(_TASKS)}. "
            "HINT: give a callable that returns (model, batch), as MODULE:ATTRIBUTE."
        )
    config.layerdrop, config.apply_spec_augment = 0.0, False  # which layers run, and what is masked, is drawn
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # without one, classifiers of text take one sample
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_config(config)
        return model, _make_batch(cast(Any, model).main_input_name, config, task, args)


def _make_batch(name: str, config: Any, task: str, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return a batch of transformers: the input of this name, and what its task compares with."""
    make_labels = partial(torch.ones, dtype=torch.int64, device="cpu")  # models look for the number of padding in them
    tokens, samples = make_labels(args.batch, args.length), make_labels(args.batch)
    size = getattr(config, "image_size", None) or 224
    sizes = [size] * 2 if isinstance(size, int) else [*size]
    frames = [getattr(config, "num_frames", 16)] if task == "VideoClassification" else []
    bins = getattr(config, "num_mel_bins", None)  # of a spectrogram
    shapes = {
        "pixel_values": [*frames, getattr(config, "num_channels", 3), *sizes],
        "input_values": [getattr(config, "max_length", 1024), bins] if bins else [_SOUND],
        "input_features": [bins or 80, 2 * getattr(config, "max_source_positions", 1500)],
    }
    inputs = torch.empty(args.batch, *(args.shape or shapes[name])) if name in shapes else tokens
    if task in ("Seq2SeqLM", "SpeechSeq2Seq"):
        length = min(args.length, getattr(config, "max_target_positions", args.length))
        return {name: inputs, "decoder_input_ids": tokens[:, :length], "labels": tokens[:, :length]}
    if task == "QuestionAnswering":
        return {name: inputs, "start_positions": samples, "end_positions": samples}
    if task == "SemanticSegmentation":
        return {name: inputs, "labels": make_labels(args.batch, *inputs.shape[2:])}
    return {name: inputs, "labels": samples if task.endswith("Classification") and task[:5] != "Token" else tokens}


def _find_task(config: Any) -> str | None:
    """Return the task of a configuration's architecture, else the first task that its model can be trained for."""
    mappings = {task: getattr(_import("transformers"), f"MODEL_FOR_{name}_MAPPING") for task, name in _TASKS.items()}
    classes_of = {task: mapping.get(type(config), None) for task, mapping in mappings.items()}
    for task, classes in classes_of.items():
        names = {each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,)) if each}
        if names & set(config.architectures or ()):
            return task
    return next((task for task, classes in classes_of.items() if classes), None)


def _suggest(name: str, names: Iterable[str]) -> str:
    """Return a clause with similar names."""
    near = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {', '.join(near)}?" if near else "."


def _make_images(samples: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.empty(samples, *shape, device="meta")
    return inputs, torch.empty(samples, dtype=torch.int64, device="meta")


def _parse_memory(text: str) -> int:
    try:
        size = check_memory_budget(text)
    except ValueError:
        size = 0.0
    if not isinstance(size, int):
        raise ValueError(f"--memory must be a size with a unit, such as 24GiB or 24GB, got {text!r}.")
    return size
