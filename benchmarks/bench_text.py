"""Language models: long sequences, adapters on quantized weights, and mixtures of experts.

    python benchmarks/bench_text.py --quick
    python benchmarks/bench_text.py --table long --tokens 8192 32768 131072 --offload-file activation_offloading.py
    python benchmarks/bench_text.py --table adapters --batch 4
    python benchmarks/bench_text.py --table experts --batch 4

Every case runs in a fresh process, on random tokens: 12 steps of 512 tokens and one of all that warm up, then
``--steps`` steps, whose median time counts, each with an update by fused AdamW. Weights are bf16, and so is the
optimizer's state. The loss reads the logits of 4096 tokens at a time, each part in a checkpoint, in all cases. With
``--compiled``, the model up to the logits is compiled.

In ``long`` all weights train. In ``adapters`` those of adapters do (peft, rank 16, on each linear layer), on layers in
four bits (bitsandbytes, NF4); their gradients are compared with those of the dense model, in one process.
Models of ``experts`` have four layers with the sizes of their names (Mixtral with half the width, DeepSeek-V3 with
those of V2-Lite), 32000 tokens in the vocabulary, and experts in grouped products.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import MIB, Record, RecordFile, finish, has_gpu, parser_for, require, show, start_in_fork
from lightning_actprune import Keep, Recompute, convert
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.convert import is_converted, mark_layers
from lightning_actprune.operators.recompute import RecomputedModule

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
"""Sizes of Llama 3.2 1B, and of ``--quick``."""
EXPERTS: dict[str, dict[str, int]] = {
    "Mixtral": {
        **{"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "Qwen3Moe": {
        **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    },
    "Olmoe": {
        **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8},
    },
    "DeepseekV3": {
        **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408},
        **{"n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 0},
    },
    "GptOss": {
        **{"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
        **{"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    },
}
LONG = ("checkpoint", "checkpoint, save_on_cpu", "checkpoint, TRL", "recompute:8", "recompute:8:offload")
LONG += ("recompute:4:offload", "recompute:exact:offload", "dense", "max", "max:offload")
GATES = "gates in 8 bits"
ADAPTERS = ("dense", "checkpoint", "balanced", f"balanced, {GATES}", "max", "recompute:8", f"balanced:offload, {GATES}")
CHOICES = ("dense", "checkpoint", "max", "recompute:8")
"""Methods of ``experts``."""
CHUNK = 4096
packing = CompiledPacking()
WARM_UP, SHORT = 12, 512
"""Steps, and their tokens, in which modules that run again are compared with their first runs."""
KEYS = ("table", "model", "tokens", "batch", "mode", "method")


# === Models ===========================================================================================


def build(kind: str, sizes: dict[str, int], tokens: int, device: str) -> nn.Module:
    """Return a model of transformers with random weights in bf16."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=tokens, use_cache=False)
    if kind in EXPERTS:
        config._experts_implementation = "grouped_mm"
    attention = "flex_attention" if kind == "GptOss" else "sdpa"  # gpt-oss has no other fused one
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, attn_implementation=attention)
        model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return model.to(torch.bfloat16).train()


def add_adapters(model: nn.Module, device: str) -> nn.Module:
    """Return a model with its linear layers in four bits, and adapters on them that train."""
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        layer = model.layers.get_submodule(name)
        options = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
        quantized = Linear4bit(layer.in_features, layer.out_features, **options)
        quantized.load_state_dict(layer.state_dict())
        model.layers.set_submodule(name, quantized.to(device))
    model.requires_grad_(False)
    targets = sorted({name.rpartition(".")[2] for name in names})
    model = inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
            if "lora_B" in name:  # they start at zero, which gives all gradients of the others zeros
                nn.init.normal_(parameter, std=0.02)
    return model


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss, of logits that are there for ``CHUNK`` tokens at a time."""
    hidden = model(inputs_embeds=model.embed_tokens(ids).requires_grad_()).last_hidden_state
    rows, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()

    def part(rows: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(rows).float(), targets, reduction="sum")

    parts = zip(rows.split(CHUNK), targets.split(CHUNK), strict=True)
    return sum(checkpoint(part, *each, use_reentrant=False) for each in parts) / len(targets)


# === Methods ==========================================================================================


def prepare(model: nn.Module, method: str, offload_file: Path | None) -> Callable[[], AbstractContextManager[Any]]:
    """Change ``model`` as a method says, and return what opens the context of a forward."""
    kind, _, other = method.partition(", ")
    if kind == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if other == "save_on_cpu":
            return partial(save_on_cpu, pin_memory=True)
        if other == "TRL":
            return offloading_of_trl(offload_file)
    elif kind.startswith("recompute"):
        bits = kind.split(":")[1]
        rule = Recompute(None if bits == "exact" else int(bits), offload=kind.endswith(":offload"))
        convert(model, "recompute", rules={"layers.*": rule})
    elif kind != "dense":
        preset, _, offload = kind.partition(":")
        rules = {"type:activation": Keep(bits=8)} if other == GATES else None
        convert(model, preset, rules=rules, offload=bool(offload))
    return contextlib.nullcontext


def compile_packing(model: nn.Module) -> None:
    """Compile a model, which packs in its graph if it was converted."""
    owners = {module.owner for module in model.modules() if is_converted(module)}
    owners |= {module._recompute.owner for module in model.modules() if isinstance(module, RecomputedModule)}
    packing.open()
    for owner in owners:
        mark_layers(model, owner, unmarked_layers=True)
    model.compile(dynamic=False)


def offloading_of_trl(path: Path) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of TRL's ``activation_offloading.py``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.logger = logging.getLogger(path.stem)  # its own one asks for the state of a distributed run
    return partial(module.OffloadActivations)


def measure(kind: str, sizes: dict[str, int], head: Record, steps: int, offload_file: Path | None) -> Record:
    """Measure one case: the bytes that it keeps, its peak, and the time of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(kind, sizes, head["tokens"], device)
    if head["table"] == "adapters":
        model = add_adapters(model, device)
    ids = torch.randint(sizes["vocab_size"], (head["batch"], head["tokens"]), device=device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = []
    if head["table"] == "adapters" and head["method"] != "dense":
        loss_of(model, ids).backward()
        gradients = [parameter.grad.float().cpu() for parameter in trained]
        model.zero_grad()
    open_context = prepare(model, head["method"], offload_file)
    if head["mode"] == "compiled":
        compile_packing(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    found: Record = {"parameters": sum(map(torch.numel, model.parameters()))}

    kept = []

    def forward(ids: Tensor) -> Tensor:
        with open_context():
            return loss_of(model, ids)

    def step(ids: Tensor) -> Tensor:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        loss = forward(ids)
        kept.append((torch.cuda.memory_allocated() if device == "cuda" else 0) - before)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if gradients:
        forward(ids).backward()
        ours = [parameter.grad.float().cpu() for parameter in trained]
        pairs = list(zip(gradients, ours, strict=True))
        similar = [nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs]
        product = sum((a * b).sum() for a, b in pairs)
        norms = [sum(each.square().sum() for each in of).sqrt() for of in (gradients, ours)]
        found |= {"cosine": round(float(product / math.prod(norms)), 4), "least_cosine": round(float(min(similar)), 4)}
        model.zero_grad()
    for _ in range(WARM_UP if device == "cuda" and head["mode"] == "eager" else 0):
        step(ids[:, :SHORT])
    found["loss"] = round(float(step(ids)), 4)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        float(step(ids))  # waits for the GPU
        times.append(time.perf_counter() - start)
    found["step_s"] = round(statistics.median(times), 4)
    found["tokens_per_s"] = round(ids.numel() / found["step_s"])
    if device == "cuda":
        found["kept_mib"] = round(kept[-1] / MIB, 1)
        found["peak_mib"] = round(torch.cuda.max_memory_allocated() / MIB, 1)
        found["reserved_mib"] = round(torch.cuda.max_memory_reserved() / MIB, 1)
    return found


def models_of(table: str, quick: bool) -> dict[str, tuple[str, dict[str, int]]]:
    """Return the models of a table: by name, the kind of transformers and its sizes."""
    if table != "experts":
        return {"Llama, small": ("Llama", SMALL)} if quick else {"Llama, 1B": ("Llama", LLAMA)}
    if quick:
        return {"Olmoe, small": ("Olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2})}
    rest = {"num_hidden_layers": 4, "vocab_size": 32000, "pad_token_id": 0}
    return {kind: (kind, sizes | rest) for kind, sizes in EXPERTS.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, and print a table."""
    parser = parser_for(__doc__, "text")
    parser.add_argument("--table", choices=("long", "adapters", "experts"), default="long")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--models", nargs="+", help="names of records")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of a case")
    parser.add_argument("--offload-file", type=Path, help="TRL's activation_offloading.py")
    args = parser.parse_args(argv)
    require(has_gpu(), args.quick)
    file = RecordFile(args.out, KEYS, args.again)
    methods = args.methods or {"adapters": ADAPTERS, "experts": CHOICES, "long": LONG}[args.table]
    for model, (kind, sizes) in models_of(args.table, args.quick).items():
        build(kind, sizes, 512, "meta")  # so that processes need not import what models are built with
        for tokens, method in itertools.product([512] if args.quick else args.tokens, methods):
            head = {"table": args.table, "model": model, "tokens": tokens, "batch": args.batch}
            head |= {"mode": "compiled" if args.compiled else "eager", "method": method}
            if method.endswith("TRL") and args.offload_file is None:
                continue
            if model in (args.models or [model]) and file.lacks(head):
                case = start_in_fork(measure, kind, sizes, head, args.steps, args.offload_file)
                [found] = finish(args.seconds, [case])
                file.add({**head, **found})
    columns = "table model tokens batch mode method kept_mib peak_mib step_s tokens_per_s cosine least_cosine error"
    show("A step", list(file.records.values()), columns.split())


if __name__ == "__main__":
    main()
