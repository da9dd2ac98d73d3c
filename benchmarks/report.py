"""Write the tables and pictures of README and docs/ from the records in `benchmarks/results`.

    python benchmarks/report.py            # rewrites the pages between their table markers, draws docs/*.png
    python benchmarks/report.py --check    # fails if a table is not what the records say

A table goes between `<!-- table: NAME -->` and `<!-- end table -->`, in one page.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import evidence
from benchmarks.evidence import Finding, findings

RESULTS = Path(__file__).with_name("results")
ROOT = RESULTS.parents[1]
DOCS = ROOT / "docs"
Record = dict[str, Any]
Records = list[Record]
MIB = 2**20


@cache
def load(name: str) -> Records:
    """Return the records of one file."""
    records: Records = json.loads((RESULTS / f"{name}.json").read_text())
    return records


def select(name: str, **fields: Any) -> Records:
    """Return the records of one file whose fields are these, without cases that failed."""
    rows = [r for r in load(name) if all(r.get(key) == value for key, value in fields.items())]
    return [r for r in rows if not isinstance(r.get("error"), str)]


def groups(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], Records]:
    """Return `records` by the values of `keys`, in order of appearance."""
    by_values: dict[tuple[Any, ...], Records] = {}
    for record in records:
        values = (record.get(key) for key in keys)
        by_values.setdefault(tuple(tuple(v) if isinstance(v, list) else v for v in values), []).append(record)
    return by_values


# === Cells and tables =============================================================================


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, with columns of figures to the right."""

    def right(column: int) -> bool:
        cells = [row[column] for row in rows if row[column] not in ("", "-")]
        return all(re.match(r"(\*\*)?[-+]?\d", cell) and len(cell) <= 40 for cell in cells)

    align = [":--", *("--:" if right(column) else ":--" for column in range(1, len(header)))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *rows))


def sourced(header: Sequence[str], rows: Sequence[Sequence[str]], records: Records, name: str) -> str:
    """Return a table with a line below that says which hardware and records it is from."""
    cards = " and ".join(dict.fromkeys(r["gpu"] if r["gpu"] != "none" else "CPU" for r in records))
    versions = " and ".join(dict.fromkeys(f"torch {r['torch']}, triton {r['triton']}" for r in records))
    return markdown(header, rows) + f"\n\n<sub>{cards}; {versions}; `results/{name}.json`</sub>"


def percent(ratio: float) -> str:
    """Return a ratio as a change."""
    change = round(100 * (ratio - 1))
    return f"{change:+d} %" if change else "0 %"


def figure(record: Record, dense: Record | None, name: str, digits: int = 0) -> str:
    """Return a figure, and in brackets by how much it differs from that of `dense`."""
    value = record.get(name)
    if value is None:
        return "-"
    compared = dense is not None and record is not dense and dense.get(name)
    return f"{value:.{digits}f}" + (f" ({percent(value / dense[name])})" if compared else "")  # type: ignore[index]


def by_model(
    records: Records, title: Callable[[Record], str], cells: Callable[[Record, Record | None], list[str]]
) -> list[list[str]]:
    """Return rows by model under a row with its title; `cells` gets a record and the dense one of its model."""
    rows: list[list[str]] = []
    titled: dict[str, Records] = {}
    for record in records:
        titled.setdefault(title(record), []).append(record)
    for name, group in titled.items():
        dense = next((r for r in group if r["method"] == "dense"), None)
        body = [cells(record, dense) for record in group]
        rows += [[f"**{name}**", *[""] * (len(body[0]) - 1)], *body]
    return rows


# === Steps: benchmarks.md, memory.md, lora.md, more_models.md, README ============================

METHODS = "dense", "checkpoint", "balanced", "max", "recompute"
MODELS = ("vit_base_patch16_224", "resmlp_12_224", "resmlp_24_224", "convnext_tiny", "resnet50", "UNet")
MODELS += ("GPT2LMHeadModel", "LlamaForCausalLM, 1.1B", "BertForSequenceClassification")
"""Methods and models of the tables of steps, in their order."""


def in_order(records: Records, models: Sequence[str] = MODELS) -> Records:
    """Return the records of these models and of METHODS, in this order."""
    rows = [r for r in records if r["model"] in models and r["method"] in METHODS]
    return sorted(rows, key=lambda r: (models.index(r["model"]), METHODS.index(r["method"])))


def compiled() -> str:
    """Memory and time of compiled steps."""
    records = in_order(select("steps", table="compiled", mode="default"))

    def cells(r: Record, dense: Record | None) -> list[str]:
        sizes = (figure(r, dense, name) for name in ("activations_mib", "peak_mib"))
        return [r["method"], *sizes, *(figure(r, dense, name, 1) for name in ("step_ms", "gpu_ms"))]

    header = ["method", "activations MiB", "peak MiB", "ms a step", "GPU ms"]
    return sourced(header, by_model(records, lambda r: r["model"], cells), records, "steps")


def reduce_overhead() -> str:
    """Time of compiled steps in the compiler's CUDA graphs."""
    records, methods = in_order(select("steps", table="compiled", mode="reduce-overhead")), METHODS[:-1]
    rows = []
    for (model,), group in groups(records, "model").items():
        by_method = {r["method"]: r for r in group}
        rows.append([model, *(figure(by_method[method], by_method["dense"], "step_ms", 1) for method in methods)])
    return sourced(["ms a step", *methods], rows, records, "steps")


def eager() -> str:
    """Time and memory of eager steps, and of the same steps replayed from CUDA graphs."""
    records = in_order(select("steps", table="graphs"), (*MODELS, "vit_small_patch16_224"))
    columns = ("dense", False), ("dense", True), ("checkpoint", False), ("max", False), ("max", True)
    columns += ("recompute", False), ("recompute", True)
    rows = []
    for (model,), group in groups(records, "model").items():
        by_column = {(r["method"], r["mode"] == "graphs" and r.get("graphs") != 0): r for r in group}
        for name, digits, unit in (("step_ms", 1, "ms a step"), ("reserved_mib", 0, "reserved MiB")):
            cells = [figure(by_column.get(key, {}), by_column["dense", False], name, digits) for key in columns]
            rows.append([f"{model}, {unit}", *cells])
    header = ["model", *(method + ", replayed" * replayed for method, replayed in columns)]
    return sourced(header, rows, records, "steps")


def other_fields() -> str:
    """Steps of models of other fields, eager and compiled."""

    def cells(r: Record, dense: Record | None) -> list[str]:
        row = [r["method"], *(figure(r, dense, name) for name in ("activations_mib", "peak_mib"))]
        compared = [f"{1 - r['cosine']:.1e}", f"{r['loss_off']:g}"] if "cosine" in r else ["-", "-"]
        return [*row, *(figure(r, dense, name, 1) for name in ("step_ms", "gpu_ms")), *compared]

    records = select("steps", table="other fields")
    rows = by_model(records, lambda r: r["model"] + ("" if r["mode"] == "eager" else ", compiled"), cells)
    header = ["method", "activations MiB", "peak MiB", "ms a step", "GPU ms", "1 - cosine", "loss off by"]
    return sourced(header, rows, records, "steps")


def adapters() -> str:
    """Steps of a language model with adapters on quantized weights."""

    def cells(r: Record, dense: Record | None) -> list[str]:
        row = [r["method"], *(figure(r, dense, name) for name in ("kept_mib", "peak_mib"))]
        return [*row, figure(r, dense, "step_s", 3), f"{r['cosine']:.4f}" if "cosine" in r else "-"]

    records = sorted(select("text", table="adapters"), key=lambda r: r["method"] != "dense")
    title = lambda r: f"{r['batch']} x {r['tokens']:,} tokens, {r['mode']}"  # noqa: E731
    header = ["method", "kept MiB", "peak MiB", "s a step", "cosine"]
    return sourced(header, by_model(records, title, cells), records, "text")


def experts() -> str:
    """Steps of mixtures of experts."""

    def cells(r: Record, dense: Record | None) -> list[str]:
        return [
            r["method"],
            *(figure(r, dense, name) for name in ("kept_mib", "peak_mib")),
            figure(r, dense, "step_s", 3),
        ]

    records = select("text", table="experts")
    rows = by_model(records, lambda r: r["model"] + ("" if r["mode"] == "eager" else ", compiled"), cells)
    return sourced(["method", "kept MiB", "peak MiB", "s a step"], rows, records, "text")


def longest() -> str:
    """Steps of one length, and the longest text that fits, on the line through what a process takes at two lengths."""
    records = select("text", table="long", mode="eager")
    same = {r["method"]: r for r in records if r["tokens"] == 32768}
    rows = []
    for method in sorted(dict.fromkeys(r["method"] for r in records), key=lambda method: method != "dense"):
        step, fits = same.get(method, {}), ["-", "-"]
        taken = sorted((r["tokens"], r["reserved_mib"]) for r in records if r["method"] == method)
        if len(taken) > 1:
            (n0, m0), (n1, m1) = taken[0], taken[-1]
            each = (m1 - m0) / (n1 - n0)
            fits = [f"{round(n1 + (1024 * gib - m1) / each, -3):,.0f}" for gib in (24, 80)]
        cells = [figure(step, same["dense"], name) for name in ("kept_mib", "peak_mib")]
        rows.append([method, *cells, figure(step, same["dense"], "step_s", 3), *fits])
    header = ["method", "kept MiB", "peak MiB", "s a step", "longest in 24 GiB", "in 80 GiB"]
    return sourced(header, rows, records, "text")


def several_gpus() -> str:
    """Steps on one and several GPUs; times are compared within one run."""
    records, methods = select("steps", table="gpus"), ("dense", "max", "recompute")
    rows = []
    for (model, mode), of_model in groups(records, "model", "mode").items():
        rows.append([f"**{model}{'' if mode == 'eager' else ', compiled'}**", *[""] * 6])
        for (strategy, devices), group in groups(of_model, "strategy", "devices").items():
            by_method = {r["method"]: r for r in group}
            dense, cells = by_method.get("dense"), []
            for name, digits in (("peak_mib", 0), ("step_ms", 1)):
                for method in methods:
                    r = by_method.get(method, {})
                    timed = name == "peak_mib" or (dense is not None and r.get("command") == dense["command"])
                    cells.append(figure(r, dense if timed else None, name, digits))
            rows.append([strategy if devices == 1 else f"{strategy}, {devices}", *cells])
    header = ["on", *(f"peak MiB, {method}" for method in methods), *(f"ms, {method}" for method in methods)]
    return sourced(header, rows, records, "steps")


def largest() -> str:
    """Largest batches under a cap, and how they and the speed there compare with dense."""
    records = [r for r in select("batch_size", axis="batch") if r["cap_gib"] == 24 and "step_ms" in r]
    methods, rows = ("dense", "checkpoint", "max", "recompute"), []
    for (model,), group in groups(records, "model").items():
        by_method, cells = {r["method"]: r for r in group}, []
        dense = by_method["dense"]
        for r in (by_method[method] for method in methods):
            speed = percent(r["samples_per_s"] / dense["samples_per_s"])
            cells.append(f"{r['batch']}" + ("" if r is dense else f" ({r['batch'] / dense['batch']:.1f} x, {speed})"))
        rows.append([model, *cells])
    return sourced(["model", *methods], rows, records, "batch_size")


def budgets() -> str:
    """Peaks of fits with a budget, beside what was predicted, and their time."""
    records = [r for r in load("steps") if r["table"] == "budgets"]
    shares, rows = ("0.3", "0.45", "0.6", "0.8"), []
    for (model, batch), group in groups(records, "model", "batch").items():
        by_method = {r["method"].removeprefix("budget:"): r for r in group}
        dense, cells = by_method["dense"], []
        for r in (by_method.get(share) for share in shares):
            if r is None:
                cells.append("-")
            elif isinstance(r.get("error"), str):
                least = re.search(r"at the least, ([\d,]+) MiB", r["error"])
                cells.append(f"refused, needs {least[1].replace(',', '')}" if least else "failed")
            else:
                cells.append(f"{r['peak_mib']:.0f} ({100 * (r['peak_mib'] / r['predicted_mib'] - 1):+.1f} %)")
        rows.append([f"{model}, batch {batch}", figure(dense, None, "peak_mib"), *cells])
    return sourced(["model", "dense", *shares], rows, records, "steps")


HEADLINE = {
    "vit_base_patch16_224": "ViT-B/16",
    "convnext_tiny": "ConvNeXt-T",
    "resnet50": "ResNet-50",
    "GPT2LMHeadModel": "GPT-2",
    "LlamaForCausalLM, 1.1B": "Llama, 1.1 billion parameters",
    "BertForSequenceClassification": "BERT",
    "UNet": "U-Net",
    "resmlp_12_224": "ResMLP-12",
    "resmlp_24_224": "ResMLP-24",
}
"""Models of the first table and the first picture, with their titles."""


def headline() -> str:
    """Peaks and times of compiled models, with `max` and checkpointed, beside the compiled dense one."""
    rows, records, ratios = [], [], []
    for model, title in HEADLINE.items():
        found = {r["method"]: r for r in select("steps", table="compiled", model=model, mode="default")}
        dense, ours, checkpoint = (found[method] for method in ("dense", "max", "checkpoint"))
        records += [dense, ours, checkpoint]
        ratios.append([r[name] / dense[name] for name in ("peak_mib", "step_ms") for r in (ours, checkpoint)])
        rows.append([title, *map(percent, ratios[-1])])
    means = map(statistics.geometric_mean, zip(*ratios, strict=True))
    rows.append(["**geometric mean**", *(f"**{percent(mean)}**" for mean in means)])
    header = ["model", "peak", "peak, checkpointing", "time", "time, checkpointing"]
    return sourced(header, rows, records, "steps")


def peak() -> str:
    """Where the peak of a step is and what it consists of."""
    rows, records = [], load("timeline")
    for r in records:
        parts = r["parts_mib"][r["peak_phase"]]
        fixed = sum(parts[name] for name in ("parameters", "gradients", "optimizer state", "batch"))
        shares = [fixed, *(parts[name] for name in ("packed tensors", "other saved tensors", "other"))]
        cells = [r["peak_phase"], *(f"{share:.0f}" for share in shares)]
        rows.append([f"{r['model']}, {r['method']}", f"{r['peak_mib']:.0f}", *cells,
                     *(f"{mib:.0f}" for mib, _ in r["without_mib"].values())])  # fmt: skip
    header = ["step", "peak MiB", "lies in", "parameters, gradients, state", "packed", "other saved", "temporary"]
    return sourced(
        [*header, "peak with half of the activations", "peak without activations"], rows, records, "timeline"
    )


# === Attention: how_it_works.md ===================================================================


def attention() -> str:
    """Errors of attention's gradients by what is kept in how many bits, and by how large the logits are."""
    records = [r for r in select("kernels", kind="attention", case="ViT-B/16") if r["stored"]]
    deviations = sorted({r["logit_std"] for r in records})
    rows = []
    for (stored, bits), group in groups(records, "stored", "value_format").items():
        errors = {r["logit_std"]: f"{100 * r['error']:.1f} %" for r in group}
        rows.append([f"{stored} in {bits.removeprefix('int')} bits", *(errors[d] for d in deviations)])
    return sourced(["kept", *(f"deviation {d:g}" for d in deviations)], rows, records, "kernels")


# === Trainings: accuracy.md, trainings.md, presets.md, few_bits.md ================================

RECIPE = ("task", "model", "dim", "depth", "patch_size", "context", "dataset", "sha256", "augmentation", "turned")
RECIPE += ("start", "lora", "epochs", "batches", "batch", "lr", "precision", "compile", "clip")
"""What two trainings have to share for their scores to be compared."""
AXES = {"dim": "dim", "depth": "depth", "patch-size": "patch_size", "context": "context", "batch-size": "batch"}
PLAIN = {"vit": {"patch_size": 4, "batch": 256}, "gpt": {"context": 256, "batch": 64}}
"""Sizes of the dense models that others are compared with, where the records name them."""


def score(study: Records) -> tuple[str, int, int]:
    """Return what `accuracy` of these runs is called, its digits, and its sign."""
    return ("validation loss", 4, -1) if study[0]["task"] == "gpt" else ("test accuracy %", 2, 1)


def words(setting: str) -> str:
    """Return a setting as a table shows it."""
    base, *rules = setting.split("+")
    name, *more = base.split(":")
    if name == "error":
        text = f"error of {more[0]}"
    elif not name[0].isdigit():
        text = name if name == "dense" else f"`{name}`" + "".join(f", s = {s}" for s in more)
    else:
        block, bits, selection, energy = [*more, *["16", "largest", "1"][len(more) - 1 :]]
        text = f"s = {name}, b = {block}" + (f", {bits} bits" if bits != "16" else "")
        text += (f", {selection}" if selection != "largest" else "") + (f", energy < {energy}" if energy != "1" else "")
    return text + "".join(f", {p.removeprefix('type:').removeprefix('blocks.*.')} {b} bits" for p, b in
                          (rule.split("=") for rule in rules))  # fmt: skip


def model_name(record: Record) -> str:
    """Return the model's name, with its own depth and width."""
    family, _, size = record["model"].rpartition("_")
    shape = re.fullmatch(r"(\d+)x(\d+)", size)
    return f"{family}_{record.get('depth') or shape[1]}x{record.get('dim') or shape[2]}" if shape else record["model"]


def title(record: Record) -> str:
    """Return what the runs of a study train on what and how."""
    if "bytes" in record:
        data = f"{record['bytes'] / 1e6:.0f} MB of text ({record['dataset']})"
    else:
        data = f"{record['train_images']} images in {record['classes']} classes"
    parts = [
        f"{model_name(record)} on {data}",
        f"{record['epochs']} epochs of {record['batches']} batches of {record['batch']}",
    ]
    parts += [f"learning rate {record['lr']:g}"]
    parts += ["RandAugment and mixup"] * bool(record.get("augmentation")) + ["compiled"] * bool(record.get("compile"))
    parts += ["fine-tuned" + (" with LoRA" if record.get("lora") else "")] * bool(record.get("start"))
    return ", ".join(parts)


def spread_of(values: Sequence[float], digits: int) -> str:
    """Return mean and, of more than one value, standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def bits_of(runs: Records) -> float:
    """Return the mean bits per value."""
    return statistics.mean(r["bits_per_value"] for r in runs)


def study_table(study: Records) -> str:
    """Return the titled table of a study: a row per setting, dense first and then by what is kept."""
    name, digits, sign = score(study)
    changes, settings = findings(study, sign), groups(study, "setting")
    rows = []
    for (setting,), runs in sorted(settings.items(), key=lambda item: (item[0][0] != "dense", -bits_of(item[1]))):
        peaks = [r["peak_mib"] for r in runs if r.get("peak_mib") is not None]
        scores = spread_of([sign * r["accuracy"] for r in runs], digits)
        cells = [f"{max(peaks):.0f}" if peaks else "-", f"{bits_of(runs):.2f}", str(len(runs)), scores]
        rows.append([words(setting), *cells, *(changes[setting].cells(digits) if setting in changes else "--")])
    header = ["setting", "peak MiB", "bits", "seeds", name, "difference to dense", "detectable"]
    if not any(row[1] != "-" for row in rows):
        header, rows = [header[0], *header[2:]], [[row[0], *row[2:]] for row in rows]
    return f"{title(study[0])}:\n\n" + sourced(header, rows, study, "trainings")


def trainings() -> Records:
    """Return the records of trainings."""
    return select("trainings", figure="training")


def is_long(record: Record) -> bool:
    """Return whether a training belongs to docs/trainings.md."""
    return bool(record.get("augmentation") or record.get("start") or record["dataset"] == "packages")


def runs_of_size(size: Record, setting: str) -> Records:
    """Return the trainings of a size that was searched, with any learning rate."""
    plain = PLAIN[size["task"]] | ({AXES[size["axis"]]: size["size"]} if size.get("axis") else {})
    fields = {"dim": None, "depth": None, "task": size["task"], **plain, "epochs": size["epochs"], "setting": setting}
    rows = [r for r in trainings() if all(r.get(k) == v for k, v in fields.items()) and not r.get("start")]
    return [r for r in rows if is_long(r) and not r.get("turned") and r.get("classes") in (None, 10)]


@cache
def sections() -> dict[str, Records]:
    """Return the trainings of docs/trainings.md by section."""
    sizes = [
        id(r) for s in select("trainings", figure="size") for of in (s["setting"], "dense") for r in runs_of_size(s, of)
    ]
    by_section: dict[str, Records] = {"classes": [], "tuned": [], "rules": [], "sizes": [], "scratch": []}
    for study in groups((r for r in trainings() if is_long(r)), *RECIPE).values():
        ruled = any("+" in r["setting"] for r in study)
        for r in study:
            tuned = r.get("start") or r.get("classes") == 5
            name = "tuned" if tuned else "classes" if r.get("turned") else "rules" if ruled else "scratch"
            by_section["sizes" if id(r) in sizes and name == "scratch" else name].append(r)
    return by_section


def section(name: str) -> str:
    """Return the tables of the studies of a section that compare something."""
    studies = groups(sections()[name], *RECIPE).values()
    return "\n\n".join(study_table(study) for study in studies if len({r["setting"] for r in study}) > 1)


def main_study(task: str) -> Records:
    """Return the long study of a task from scratch."""
    return [r for r in sections()["scratch"] if r["task"] == task]


def preset_finding(name: str, study: Records) -> tuple[float, Finding | None]:
    """Return bits and difference of a preset in a study; in a ResNet the paper's sparsity stands for `paper`."""
    setting = "0.6:32" if name == "paper" and study[0]["task"] == "resnet" else name
    runs = [r for r in study if r["setting"] == setting]
    return (bits_of(runs) if runs else 0.0), findings(study, score(study)[2]).get(setting)


PRESETS = "paper", "balanced", "max", "recompute"


def presets() -> str:
    """Bits of each preset and its differences to dense."""
    studies = [main_study(task) for task in ("resmlp", "vit", "resnet", "gpt")]
    dense = [
        spread_of([score(s)[2] * r["accuracy"] for r in s if r["setting"] == "dense"], score(s)[1]) for s in studies
    ]
    rows = [["dense", "16.00", *dense]]
    for name in PRESETS:
        findings_of = [preset_finding(name, study) for study in studies]
        bits = [each[0] for each in findings_of if each[0]]
        cells = [f.cells(score(s)[1])[0] if f else "-" for (_, f), s in zip(findings_of, studies, strict=True)]
        rows.append([f"`{name}`", f"{min(bits):.2f} - {max(bits):.2f}", *cells])
    return markdown(["preset", "bits", *(f"{model_name(s[0])}, {score(s)[0]}" for s in studies)], rows)


def together() -> str:
    """What the image models say together."""
    by_preset = {
        name: [preset_finding(name, main_study(t))[1] for t in ("resmlp", "vit", "resnet")] for name in PRESETS
    }
    rows = [[f"`{name}`", *evidence.together([f for f in each if f]).cells(2)] for name, each in by_preset.items()]
    return markdown(["preset", "difference to dense", "detectable"], rows)


def sizes() -> str:
    """Larger models in the memory of the dense one, trained for its time."""
    parts = []
    for group in groups(select("trainings", figure="size"), "task").values():
        rows = []
        for r in group:
            ours, dense = (runs_of_size(r, setting) for setting in (r["setting"], "dense"))
            for lr in sorted({run["lr"] for run in dense}, reverse=True):
                pair = [[run for run in runs if run["lr"] == lr] for runs in (ours, dense)]
                scores = [
                    spread_of([score(group)[2] * x["accuracy"] for x in runs], score(group)[1]) if runs else "-"
                    for runs in pair
                ]
                more = sorted((r.get("size", 1), r.get("dense_size", 1)))
                size = f"{r['size']} ({more[1] / more[0]:.1f})" if r.get("axis") else "-"
                name = f"{r['axis']}, {words(r['setting'])}" if r.get("axis") else "dense"
                cells = [size, f"{r['peak_mib']:.0f}", f"{r['step_ms']:.1f}", str(r["epochs"]), f"{lr:g}", *scores]
                rows.append([name, *cells])
        header = ["axis, setting", "size", "peak MiB", "step ms", "epochs", "learning rate", score(group)[0], "dense"]
        parts.append(f"{group[0]['model']}:\n\n" + sourced(header, rows, group, "trainings"))
    return "\n\n".join(parts)


def short(task: str) -> str:
    """Short trainings of a task: the study of the most runs."""
    studies = groups((r for r in trainings() if r["task"] == task and not is_long(r)), *RECIPE).values()
    return study_table(max(studies, key=len))


def gradients() -> str:
    """Cosines and norm ratios of weight gradients in the middle of a training."""
    left_out, parts = ("0.3:32", "0.5:16", "0:32:8", "0.5:32:4"), []
    for study in groups(select("trainings", figure="gradient"), *RECIPE, "after").values():
        kinds, rows = list(dict.fromkeys(r["kind"] for r in study)), []
        for (setting,), runs in groups((r for r in study if r["setting"] not in left_out), "setting").items():
            cells = {r["kind"]: f"{r['cosine']:.4f} / {r['norm_ratio']:.2f}" for r in runs}
            rows.append([words(setting), f"{bits_of(runs):.2f}", *(cells.get(kind, "-") for kind in kinds)])
        text = f"{model_name(study[0])}, after {study[0]['after']} of {study[0]['epochs']} epochs:\n\n"
        parts.append(text + sourced(["setting", "bits", *kinds], rows, study, "trainings"))
    return "\n\n".join(parts)


# === Errors of gradients: few_bits.md ==============================================================


def bounds() -> str:
    """Predicted and actual errors of the whole gradient of models, untrained and after some steps."""
    records = [r for r in select("errors") if r["setting"].endswith(("max", "0.1"))]
    settings = list(dict.fromkeys((r["setting"], r["steps"]) for r in records))
    rows = []
    for (model,), group in groups(records, "model").items():
        cells = {(r["setting"], r["steps"]): f"{r['predicted']:.3f}, {r['actual']:.3f}" for r in group}
        rows.append([model, *(cells.get(each, "-") for each in settings)])
    header = ["model", *(f"{setting}, {steps} steps" for setting, steps in settings)]
    return sourced(header, rows, records, "errors")


def growth() -> str:
    """Largest errors of settings over dense trainings, and the bytes kept at the start and at the end."""
    rows = []
    for r in (records := select("trainings", figure="error")):
        predicted, actual, kept = (list(column) for column in list(zip(*r["errors"], strict=True))[1:])
        place = predicted.index(max(predicted))
        cells = f"{predicted[place]:.3f}", f"{actual[place]:.3f}", f"{100 * kept[0]:.1f} %", f"{100 * kept[-1]:.1f} %"
        rows.append([model_name(r), words(r["setting"]), *cells])
    header = "model", "setting", "largest error", "actual", "kept at the start", "kept at the end"
    return sourced(header, rows, records, "trainings")


# === The zoo, and the paper's accounting ==========================================================


def share(record: Record, preset: str) -> str:
    """Return what a model of the zoo keeps with a preset, in percent of dense."""
    return f"{100 * record[f'{preset}_kib'] / record['kib']:.1f} %" if f"{preset}_kib" in record else "-"


def zoo() -> str:
    """What the presets keep of each model of the zoo, and how close gradients are: medians, then model by model."""
    records = [r for r in load("zoo") if r["kind"] == "model"]
    whole = [r for r in records if all(r.get(f"{p}_cosine") is not None for p in ("balanced", "max"))]
    medians = []
    for (library,), group in groups(whole, "zoo").items():
        cosines = [f"{statistics.median(r[f'{p}_cosine'] for r in group):.4f}" for p in ("balanced", "max")]
        kept = [
            f"{100 * statistics.median(r[f'{p}_kib'] / r['kib'] for r in group):.1f} %" for p in ("balanced", "max")
        ]
        medians.append([f"{library} {group[0]['version']}", str(len(group)), *cosines, *kept])
    rows = []
    for r in records:
        values = [r.get(name) for name in ("noise", "bfloat16", "balanced_cosine", "max_cosine")]
        off = [r[f"{p}_forward"] for p in ("balanced", "max") if f"{p}_forward" in r]
        notes = ["chaotic"] if r.get("noise") is not None and r["noise"] < 0.95 else []
        notes += dict.fromkeys(r[key] for key in r if key.endswith(("error", "left")))
        escaped = re.sub(r"[|*_`<\[\]]", lambda mark: f"&#{ord(mark[0])};", "; ".join(notes))
        cells = ["-" if value is None else f"{value:.4f}" for value in values] + [
            share(r, p) for p in ("balanced", "max")
        ]
        output = f"{max(off):.0e}".replace("0e+00", "0") if off else "-"
        rows.append([f"{r['zoo']}/{r['model']}", *cells, output, escaped])
    columns = ("balanced", "max, s = 0.5", "kept, balanced", "kept, max, s = 0.5")
    parts = [markdown(["library", "models", *columns], medians), f"All {len(records)} models:"]
    parts += [sourced(["model", "rounded inputs", "bfloat16", *columns, "output", "notes"], rows, records, "zoo")]
    return "\n\n".join(parts)


def zoo_causes() -> str:
    """Which operator the worst gradients of the zoo are off by."""
    records = [r for r in load("zoo") if r["kind"] == "cause"]
    labels, rows = ("balanced", "linear", "convolution", "activation", "norm", "all"), []
    for r in sorted(records, key=lambda r: r["balanced"]):
        cosines = [f"{r[label]:.4f}" if label in r else "-" for label in labels]
        costs = [percent(r[f"{label}_kib"] / r["balanced_kib"]) for label in ("activation", "all")]
        rows.append([f"{r['zoo']}/{r['model']}", *cosines, *costs])
    return sourced(["model", *labels, "bytes, activation", "bytes, all"], rows, records, "zoo")


PAPER_SAVED_MIB = {"0.6": (365.2, 384.2, 393.9), "0.7": (437.7, 456.3, 462.0), "0.8": (516.4, 524.1, 528.2)}
PAPER_DENSE_MIB = 1599.2
"""Table III of the paper (arXiv 2311.16883) by sparsity, for b = 16, 32 and 64, and its dense total."""


def components() -> str:
    """Table I: what a training step keeps."""
    sizes = {r["component"]: r["bytes"] / MIB for r in select("paper", table="components")}
    total = sum(sizes.values())
    sizes["activations, all"] = sum(size for name, size in sizes.items() if name.startswith("activations"))
    rows = [[name, f"{size:.1f}", f"{100 * size / total:.1f}"] for name, size in {**sizes, "all": total}.items()]
    return markdown(["component", "MiB", "share %"], rows)


def positions() -> str:
    """Table II: bytes of positions in percent of the dense tensor."""
    rows = []
    for (dtype, length, block), group in groups(
        select("paper", table="overhead"), "dtype", "length", "block_size"
    ).items():
        cells = [f"{100 * (r['bsr_columns_bytes'] + r['bsr_pointers_bytes']) / r['dense_bytes']:.2f}" for r in group]
        paper = f"{100 / block + 100 / length:.2f}" if dtype == "float32" else "-"
        ours = f"{100 * group[0]['formula_bytes'] / group[0]['dense_bytes']:.2f}"
        rows.append([f"{dtype}, D = {length}, b = {block}", ours, *cells, paper])
    return markdown(["tensor", "ours", *(f"BSR, s = {s}" for s in PAPER_SAVED_MIB), "1/b + 1/D"], rows)


def savings() -> str:
    """Table III: MiB of activations saved, by formula, measured, and by the paper."""
    activations = {r["method"]: r["activations_mib"] for r in select("steps", table="paper")}
    dense, rows = activations["dense"], []
    for r in select("paper", table="savings"):
        s, b = f"{r['sparsity']:g}", r["block_size"]
        ours, *bsr = (r[f"{name}_saved_bytes"] / MIB for name in ("ours", "bsr_int32", "bsr_int64"))
        pruned = activations.get(f"linear:s{s}:b{b}:blocks")
        paper = PAPER_SAVED_MIB[s][(16, 32, 64).index(b)]
        cells = [f"{ours:.1f}", "-" if pruned is None else f"{dense - pruned:.1f}", *(f"{x:.1f}" for x in bsr)]
        cells += [f"{paper:.1f}", f"{100 * ours / dense:.1f}", f"{100 * paper / PAPER_DENSE_MIB:.1f}"]
        rows.append([f"s = {s}, b = {b}", *cells])
    header = ["setting", "formula", "measured", "BSR, int32", "BSR, int64", "paper", "share %", "paper's share %"]
    return sourced(header, rows, select("steps", table="paper"), "steps")


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "brief": headline,
    "compiled": compiled,
    "eager": eager,
    "reduce_overhead": reduce_overhead,
    "experts": experts,
    "other_fields": other_fields,
    "longest": longest,
    "adapters": adapters,
    "gpus": several_gpus,
    "largest": largest,
    "budgets": budgets,
    "peak": peak,
    "attention": attention,
    "presets": presets,
    "together": together,
    "sizes": sizes,
    "scratch": lambda: section("scratch"),
    "classes": lambda: section("classes"),
    "tuned": lambda: section("tuned"),
    "rules": lambda: section("rules"),
    **{f"short_{task}": (lambda task=task: short(task)) for task in ("resmlp", "vit", "gpt", "resnet")},
    "gradients": gradients,
    "zoo": zoo,
    "zoo_causes": zoo_causes,
    "components": components,
    "positions": positions,
    "savings": savings,
    "bounds": bounds,
    "growth": growth,
}
"""Tables by the name of their markers."""
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def rendered(texts: dict[Path, str]) -> dict[Path, str]:
    """Return the pages with every table written anew.

    Raises:
        ValueError: If a table has no markers or more than one pair of them, or markers have no table.
    """
    names = [match[2] for text in texts.values() for match in MARKED.finditer(text)]
    if sorted(names) != sorted(TABLES):
        wrong = [name for name in {*names, *TABLES} if names.count(name) != 1 or name not in TABLES]
        raise ValueError(f"Each table needs one pair of markers, and each pair a table: {', '.join(sorted(wrong))}.")
    return {
        path: MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)
        for path, text in texts.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the pages and draw the pictures, or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    before = {path: path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
    changed = {path: text for path, text in rendered(before).items() if text != before[path]}
    for path, text in changed.items():
        if args.check:
            print(f"{path.relative_to(ROOT)} is not what the records say: run `python benchmarks/report.py`.")
        else:
            path.write_text(text)
    if args.check:
        return int(bool(changed))
    from benchmarks import pictures

    pictures.draw_all(DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
