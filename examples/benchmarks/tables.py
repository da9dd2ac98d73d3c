"""Write the result tables and pictures of the README and of the pages in ``docs/`` from the committed figures.

    python examples/benchmarks/tables.py            # rewrites the pages between their table markers, draws docs/*.png
    python examples/benchmarks/tables.py --check    # fails if a page is not what the figures say

A table goes where its markers are, in one page. One whose figures are not there (``results/<name>.json``) is left as it
stands. Pictures are linked as from a page in ``docs/``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import batch_size as batch_sizes
from examples.benchmarks import formats as format_times
from examples.benchmarks import lightning_tests as own_tests
from examples.benchmarks import logits as logits_benchmark
from examples.benchmarks import plots, sensitivity, summaries, timeline
from examples.benchmarks import rivals as rivals_benchmark
from examples.benchmarks.common import RESULTS
from examples.benchmarks.study import evidence
from examples.benchmarks.study import results as study
from examples.benchmarks.summaries import Record, Records, Summary, are_figures, groups, percent, time_change

ROOT = RESULTS.parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PICTURE = DOCS / "kernels.png"


def load(name: str, results: Path = RESULTS) -> Records | None:
    """Return the records of one result file, or nothing if it is not there."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table: names and words to the left, figures to the right."""
    columns = range(1, len(header))
    align = [":--", *("--:" if are_figures([str(row[number]) for row in rows]) else ":--" for number in columns)]
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def source(records: Records) -> str:
    """Return the line that says where the figures of one command come from."""
    first, cards = records[0], " or ".join(dict.fromkeys(r["gpu"] for r in records))
    where = f"{cards}, torch {first['torch']}, triton {first['triton']}"
    return f"\n\n<sub>{where}; `{first['command']}`</sub>"


def sources(records: Records) -> str:
    """Return a line for each of the commands that figures come from."""
    return "".join(source(group) for group in groups(records, "command").values())


def memory(records: Records) -> str:
    """Activation memory and peak: dense, checkpointed, pruned."""
    rows = []
    for r in records:
        setting = f", s = {r['sparsity']}, b = {r['block_size']}" if r["method"] == "pruned" else ""
        figures = [f"{r['activations_mib']:.1f}", f"{r['peak_mib']:.1f}"]
        figures += [
            f"{r[name]:.1f}" if name in r else "-" for name in ("saved_mib", "accounted_saved_mib", "paper_saved_mib")
        ]
        rows.append([r["method"] + setting, *figures])
    header = ["method", "activations MiB", "peak MiB", "saved MiB", "counted MiB", "paper saved MiB"]
    return markdown(header, rows) + source(records[:1])


def grouped(summary: Summary) -> Summary:
    """Return a summary with a row for each name of its first column above those that begin with it, one column less."""
    rows: list[list[str]] = []
    for (name,), group in groups([{"name": row[0], "row": row} for row in summary.rows], "name").items():
        rows += [[f"**{name}**", *[""] * (len(summary.header) - 2)], *(r["row"][1:] for r in group)]
    return summary._replace(header=summary.header[1:], rows=rows)


def narrowed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows of a wide table with what is in brackets on a line of its own, so that a page has room for it."""
    return [[re.sub(r"(?<=\w) \((?=[^()]*\)$)", "<br>(", cell) for cell in row] for row in rows]


def summarised(summary: Summary, records: Records) -> str:
    """Return a summary as Markdown with its source."""
    return markdown(summary.header, summary.rows) + source(records[:1])


def from_commands(summary: Summary, records: Records) -> str:
    """Return a summary as Markdown with all commands that it comes from."""
    return markdown(summary.header, summary.rows) + sources(records)


PRESETS_TEXT = """\
[Long trainings](trainings.md): dense scores as mean ± standard deviation over the seeds, below them the differences to
these, ± their standard errors. A difference with a star is one that chance alone would make once in 20 times; of
losses, more is worse. Bits are what is kept of every 16 bits that are kept dense; where `paper` stands for its sparsity
alone, such as in the ResNet, whose convolutions the preset itself leaves dense, they are those of the pruned layers."""
PRESET_TASKS = "resmlp", "vit", "resnet", "gpt"
PRESET_STEPS_TEXT = """\
Eager steps (forward, backward, fused AdamW) of models as their libraries build them, bf16 autocast; in brackets, how
much more or less that is than dense. `checkpoint` runs every block again in backward."""


OTHER_STEPS_TEXT = """\
Steps of models as their libraries build them, bf16 autocast, every operator covered; in brackets, how much more or less
that is than dense in the same mode. `graph` replays the eager step from a CUDA graph, which takes the host's part away;
`budget` is that of the compiler, `activation_memory_budget=0.5`; `reduce-overhead` is compiled with CUDA graphs, whose
memory the allocator does not tell apart. `host ms`: how long Python takes to issue a step to an idle GPU. Each record
of `others.json` names the command it is from; below is the first."""


def other_steps(steps: Records) -> str:
    """Memory and time of real models whose other layers keep few bits too."""
    return OTHER_STEPS_TEXT + "\n\n" + summarised(grouped(summaries.presets(steps)), steps)


def presets(trainings: Records) -> str:
    """What the presets keep and what they do to accuracy."""
    scores = evidence.presets([s for task in PRESET_TASKS if (s := evidence.main_study(task, trainings))])
    return PRESETS_TEXT + "\n\n" + markdown(scores.header, scores.rows)


def preset_steps(steps: Records) -> str:
    """Memory and time of real models with the presets."""
    return PRESET_STEPS_TEXT + "\n\n" + summarised(grouped(summaries.presets(steps)), steps)


def kernels(records: Records) -> str:
    """Speed of the weight gradient: a table, and a picture per dtype."""
    dtypes = dict.fromkeys(r["dtype"] for r in records)
    paths = {dtype: plots.picture_path(PICTURE, dtype).relative_to(DOCS) for dtype in dtypes}
    pictures = [f"![Weight gradient, {dtype}]({path.as_posix()})" for dtype, path in paths.items()]
    parts = [summarised(summaries.time_grid(records), records), *pictures]
    if len({r["command"] for r in records}) == 1 and all("elapsed_s" in r for r in records):
        elapsed = max(r["elapsed_s"] for r in records)
        parts.insert(1, f"Measuring took {elapsed:.0f} s, compilation of kernels not yet in Triton's cache included.")
    return "\n\n".join(parts)


def pack(records: Records) -> str:
    """Time of pack beside a device copy."""
    return summarised(summaries.pack(records), records)


def formats(records: Records) -> str:
    """Times of value formats and block selections over those of the paper's method."""
    return summarised(format_times.ratios(records), records)


STEP_TEXT = """\
Whole training steps (forward, backward, fused AdamW), linear layers of the blocks pruned at s = 0.6, b = 32; in
brackets, how much more or less time that is than dense; memory as dense / checkpoint / pruned. `graph` is the eager
step captured in one CUDA graph: the GPU's time without Python's; `compile` is `torch.compile(fullgraph=True)`."""


def step(records: Records) -> str:
    """Time and memory of training steps."""
    return STEP_TEXT + "\n\n" + summarised(summaries.steps(records), records)


MODELS_TEXT = """\
Models as their libraries build them, bf16 autocast, AdamW; every linear layer that `convert` takes is pruned at
s = {sparsity}, b = {block_size}. Memory as dense / pruned, by the CUDA allocator, each case in a fresh process; "saved"
is measured, "announced" is what the package says the layers save, with the 16-bit copies of weights that autocast makes
and only dense layers keep. "Pruned layers" are those that pack of those converted: frozen ones do not, nor those whose
weight the model uses without calling the layer."""


def models(records: Records) -> str:
    """Which third-party models are pruned as they come, and what it saves."""
    settings = next(r for r in records if r["method"] == "pruned")
    summary = summaries.models(records)
    number, reasons = summary.header.index("left dense"), []
    for row in summary.rows:
        # Reasons are sentences, which would make the table as wide as two pages.
        count, _, reason = row[number].partition(" (")
        if reason:
            reasons.append(f"- {row[0]}: {reason.removesuffix(')')}")
            row[number] = count
    parts = [MODELS_TEXT.format_map(settings), summarised(summary, records)]
    return "\n\n".join([*parts, "Why layers are left dense:", "\n".join(reasons)] if reasons else parts)


TIMELINE_TEXT = """\
The peak of a step, where it lies, and what it consists of there, in MiB; last, what it would be at most with half or
all of the activations gone. {batch} images, bf16 autocast, AdamW; checkpointing is of every block."""


def peak(records: Records) -> str:
    """Where the peak of a step is, with a picture per model."""
    pictures = [
        f"![Memory over a step, {name}]({timeline.picture_path(name).relative_to(DOCS).as_posix()})"
        for name in dict.fromkeys(r["model"] for r in records)
    ]
    summary = summaries.timeline(records)
    summary = summary._replace(rows=narrowed(summary.rows))
    return "\n\n".join([TIMELINE_TEXT.format_map(records[0]), summarised(summary, records), *pictures])


BATCH_SIZE_TEXT = """\
The largest batch found with which a fit of three steps completes in a process that may allocate {cap_gib:g} GiB,
searched to 1 in 32 (what the allocator cannot join adds about as much): `Trainer(precision="bf16-mixed")`, fused AdamW;
in brackets, how many times that of dense. Last, what Lightning's `BatchSizeFinder` finds by itself (`mode="binsearch"`,
no margin), and whether the fit that goes on with it runs out of memory."""


def batch_size(records: Records) -> str:
    """How large a batch fits under a cap."""
    return BATCH_SIZE_TEXT.format_map(records[0]) + "\n\n" + summarised(grouped(batch_sizes.summary(records)), records)


SENSITIVITY_TEXT = """\
`measure_sensitivity(model, loss, batches)` with its default grid and two batches, bf16 autocast, and the memory that it
takes beside a dense step. "First time" includes the compilation of kernels, but for those that the model above it has
compiled in the same process."""


def sensitivities(records: Records) -> str:
    """How long a sensitivity measurement takes."""
    return SENSITIVITY_TEXT + "\n\n" + summarised(sensitivity.summary(records), records)


HEADLINE = {
    "vit_base_patch16_224": ("ViT-B/16", "vit"),
    "GPT2LMHeadModel": ("GPT-2", "gpt"),
    "LlamaForCausalLM, 1.1B": ("Llama, 1.1 billion parameters", None),
    "resnet50": ("ResNet-50", "resnet"),
    "resmlp_12_224": ("ResMLP-12", "resmlp"),
}
"""Models of the first tables: what they are called, and the task of the study that trains a small one."""
HEADLINE_METHODS = ("checkpoint", "max")
_MEMORY = "activations_mib", "peak_mib"
HEADLINE_TEXT = """\
Dense memory, then in bold the change with `ActivationPruning("max")` and in brackets with every block checkpointed, of
eager steps through a Trainer, bf16-mixed, fused AdamW, on an {gpu}. Times are changes too, compiled to the compiled
dense model: of the quickest turn and of the median of up to {turns}. Where these differ, a shared host kept the GPU
waiting. Accuracy is that of *smaller* models of the same kind, trained [from scratch](docs/trainings.md) on CIFAR-10,
GPT-2's of one as wide and deep on bytes (a higher loss is worse): the difference to dense ± its standard error
({trained}). [More](docs/benchmarks.md#through-a-trainer)."""


BRIEF_TEXT = """\
Eager steps with `ActivationPruning("max")` through a Trainer, bf16-mixed, fused AdamW, on an
{gpu}, beside dense ones. In brackets: the same steps with every block checkpointed. Times
of eager steps, of the quickest turn and of the median, depend on [how fast the host
is](compile.md#when-the-host-is-the-limit). Accuracy is that of *smaller*
models of the same kind (the GPT is as wide and deep), `"max"` beside dense, ± the
standard error (a higher loss is worse).
[Benchmarks](benchmarks.md), [accuracy](accuracy.md) and [long trainings](trainings.md) have the whole tables."""


def accuracy_of(task: str | None, trainings: Records) -> tuple[str, str]:
    """Return what ``"max"`` does to the score of a task, and what was trained."""
    runs = evidence.main_study(task, trainings)
    setting, finding = evidence.of_preset("max", runs)
    if finding is None:
        return "not measured", ""
    score, seeds = study.score_of(runs[0]), len(study.by_setting(runs)[setting])
    unit = score.name if score.sign < 0 else "points"
    dropped = setting.partition("every layer")[2]
    what = f"{study.model(runs[0])}, {runs[0]['epochs']} epochs, {seeds} seeds{dropped}"
    return f"{finding.shown(score.digits)} {unit}", what


def brief(steps: Records, trainings: Records) -> str:
    """What the README's first table says, in columns that a phone can show."""
    rows = []
    for model, (title, task) in HEADLINE.items():
        dense, checkpoint, ours = headline_steps(steps, model)
        cells = [_changes(dense, checkpoint, ours, name, "<br>") for name in _MEMORY]
        cells.append(_times(dense, checkpoint, ours, "<br>"))
        rows.append([title, *cells, accuracy_of(task, trainings)[0]])
    header = ["model", "activations", "peak memory", "step time", "accuracy"]
    return markdown(header, rows) + "\n\n" + BRIEF_TEXT.format(gpu=steps[0]["gpu"])


def headline_steps(steps: Records, model: str) -> Records:
    """Return the steps of a model that the first tables show: dense, checkpointed, ours."""
    found = {r["method"]: r for r in steps if r["model"] == model}
    return [found[method] for method in ("dense", *HEADLINE_METHODS)]


def compiled_time(compiled: Records, model: str) -> str:
    """Return how the time of a compiled step changes, as far as it was measured."""
    found = {r["method"]: r for r in compiled if r["model"] == model}
    if not {"dense", "max"} <= set(found):
        return "not measured"
    return _times(found["dense"], found.get("checkpoint"), found["max"], " ")


def headline(steps: Records, compiled: Records, trainings: Records) -> str:
    """What five models need, checkpointed and with ``"max"``, beside dense, and what that does to accuracy."""
    rows, trained = [], []
    for model, (title, task) in HEADLINE.items():
        dense, checkpoint, ours = headline_steps(steps, model)
        cells = [f"{dense[name]:.0f} MiB: {_changes(dense, checkpoint, ours, name, ' ')}" for name in _MEMORY]
        cells += [_times(dense, checkpoint, ours, " "), compiled_time(compiled, model)]
        change, what = accuracy_of(task, trainings)
        trained += [what] if what else []
        rows.append([f"{title}, batch {dense['batch']}", *cells, change])
    header = ["model", "activations", "peak memory", "eager step", "compiled step", "accuracy of a smaller model"]
    turns = most_turns([*steps, *compiled])
    text = HEADLINE_TEXT.format(gpu=steps[0]["gpu"], trained="; ".join(trained), turns=turns)
    return markdown(header, rows) + "\n\n" + fill(text, 120, break_on_hyphens=False)


def _changes(dense: Record, checkpoint: Record, ours: Record, name: str, between: str) -> str:
    return f"**{percent(ours[name] / dense[name])}**{between}({percent(checkpoint[name] / dense[name])})"


def _times(dense: Record, checkpoint: Record | None, ours: Record, between: str) -> str:
    more = "" if checkpoint is None else f"{between}({time_change(checkpoint, dense)})"
    return f"**{time_change(ours, dense)}**{more}"


ZOO_TEXT = """\
{count} models of {libraries}, untrained, with small inputs, in fp32 on a CPU. Cosines are those of the gradient of all
parameters with the one of the dense model. "Rounded inputs" is the dense model again, with what goes into it rounded to
bfloat16, and "bfloat16" under autocast to it: a model where these are far from 1 is chaotic at its start, and its other
cosines do not mean much. "Kept" is in
percent of what the dense model keeps for backward; tensors of fewer than {least} values are left alone. "Output" is by
how much outputs differ from those of the dense model, in parts of the largest, 0 if they are equal bit by bit."""


def zoo(records: Records) -> str:
    """What the presets keep of each model of the zoo, and how close gradients are: medians, and model by model."""
    libraries = groups([r for r in records if summaries.zoo_is_measured(r)], "zoo")
    medians = []
    for (library,), group in libraries.items():
        cosines, kept = (
            [statistics.median(of(r, preset) for r in group) for preset in summaries.ZOO_PRESETS]
            for of in (lambda r, preset: r[f"{preset}_cosine"], summaries.zoo_share)
        )
        cells = [*(f"{cosine:.4f}" for cosine in cosines), *(f"{share:.1%}".replace("%", " %") for share in kept)]
        medians.append([f"{library} {group[0]['version']}", str(len(group)), *cells])
    names = " and ".join(library for (library,) in libraries)
    text = ZOO_TEXT.format(count=len(records), libraries=names, least=summaries.ZOO_MIN_VALUES)
    header = ("library", "models", "balanced", "max", "kept, balanced", "kept, max")
    parts = [text, "Medians of all models with a gradient:", markdown(header, medians), "Model by model:"]
    return "\n\n".join([*parts, summarised(summaries.zoo_models(records), records)])


def zoo_causes(records: Records) -> str:
    """Which operator the worst gradients of the zoo are off by."""
    return summarised(summaries.zoo_causes(records), records)


LIGHTNING_TESTS_TEXT = """\
Lightning {lightning} with the tests of {tests_of} (commit {commit:.7}), torch {torch}, Python {python}, {cpu}, no GPU.
A test counts as failing only with our callbacks if it passes without them and fails with them twice. Folders were run
in calls of their own, the first of them before the last corrections of the monitor."""


def lightning_tests(records: Records) -> str:
    """How many of Lightning's own tests pass with our callbacks in every Trainer, and why others do not."""
    first = records[0]
    text = LIGHTNING_TESTS_TEXT.format(commit=first["tests_commit"], **first)
    counted, causes = own_tests.counted(records), own_tests.causes(records)
    parts = [text, markdown(counted.header, counted.rows)]
    parts += ["Why these fail:", markdown(causes.header, causes.rows)] if causes.rows else []
    return "\n\n".join(parts) + f"\n\n<sub>`{first['command']}`</sub>"


BUDGETS_TEXT = """\
Fits with a budget, a share of the dense peak, through a Trainer: `precision="bf16-mixed"`, eager, fused AdamW. Times
are of one run with a slow host, each step waited for, but of GPT-2; in brackets, how much more or less than dense."""
COMPILED_TEXT = """\
All methods of a model were measured in turn, in steps one after the other; `compiler:0.5` is the dense model under the
compiler's `activation_memory_budget`. Times are medians of up to {turns} turns in several runs, beside them the
quickest one: where they differ, a host that others share kept the GPU waiting, as with all of the U-Net. The
ResMLPs were measured on a slow host, for which steps with `balanced` and `max` wait; why it takes so long for those of
the ResMLP-24 is not understood. The Llama without a size is one of GPT-2's size."""
GRAPHS_TEXT = """\
Compiled with `mode="reduce-overhead"`. CUDA graphs have memory in pools of their own, so it is what the allocator holds
in all, gaps included. In another run of the GPT-2 it held 1,500 MiB less of the dense model and as much more
of the others, with which `max` saves 19 % there."""
RIVALS_TEXT = """\
Steps of a fit each, in a process of its own: `Trainer(precision="bf16-mixed")`, eager, fused AdamW. `checkpoint` is the
library's own, `offload` is TRL's streamed offloading to the host's memory, `budget:0.5` is half the dense peak. Several
methods of a model warmed up at a time and measured in turn. Times are medians of up to {turns} turns in several runs,
beside them the quickest one. Samples are images or texts, by the median. The host's time is that of a step for a GPU
that has nothing to do; others share the host, and where its time is longer than the GPU's, it decides: from turn to
turn steps of a dense ViT differed by {dense:.1f} %, with `max`, for which the host takes longer, by {ours:.0f} %.
Those of the Llama with 1.1 billion parameters were measured one after the other, its offloading on another machine."""
SCALING_TEXT = """\
The same batch on each GPU, of the process that needs most and of the slowest. In brackets, how much more or less than
dense on as many GPUs; `than on one GPU` compares a method with itself. Times are compared within a run."""
LOGITS_TEXT = """\
One training step, eager, bf16 autocast, fused AdamW; `together` is `linear_cross_entropy`."""


def most_turns(records: Records) -> int:
    """Return of how many turns times are medians, at the most."""
    return max(len(r.get("step_ms_rounds") or ["the only one"]) for r in records)


def rivals(records: Records) -> str:
    """Presets and checkpointing through a Trainer."""
    found = {r["method"]: r["step_ms_rounds"] for r in records if r["model"] == "vit_base_patch16_224"}
    dense, ours = (100 * (max(found[method]) / min(found[method]) - 1) for method in ("dense", "max"))
    text = RIVALS_TEXT.format(dense=dense, ours=ours, turns=most_turns(records))
    return text + "\n\n" + from_commands(grouped(summaries.frontier(records)), records)


def scaling(records: Records) -> str:
    """Steps on several GPUs."""
    return SCALING_TEXT + "\n\n" + from_commands(grouped(summaries.scaling(records)), records)


def compiled(records: Records) -> str:
    """Steps of compiled models."""
    text = COMPILED_TEXT.format(turns=most_turns(records))
    return text + "\n\n" + from_commands(grouped(summaries.frontier(records)), records)


def graphs(records: Records) -> str:
    """Steps that are replayed from CUDA graphs."""
    return GRAPHS_TEXT + "\n\n" + summarised(grouped(summaries.graphs(records)), records)


LARGEST_TEXT = """\
The same search with the presets as `rivals.py` has them, with the speed at that batch. Under 16 GiB only `recompute`
and checkpointing were searched. In searches before those of the ResNet and of `max` on the ViT, the BERT and the U-Net,
some of what a trial that ran out of memory had kept could still be there in the next one, so there may be a little more
room than they found."""


def largest(records: Records) -> str:
    """How large a batch fits under a cap, and how fast it trains."""
    return LARGEST_TEXT + "\n\n" + from_commands(grouped(rivals_benchmark.largest_batches(records)), records)


def budgets(records: Records) -> str:
    """Peaks of fits with a budget beside what was predicted."""
    return BUDGETS_TEXT + "\n\n" + summarised(grouped(summaries.budgets(records)), records)


def logits(records: Records) -> str:
    """Head and loss of a language model together."""
    return LOGITS_TEXT + "\n\n" + summarised(grouped(logits_benchmark.summary(records)), records)


TABLES: dict[str, tuple[Sequence[str], Callable[..., str]]] = {
    "headline": (("rivals", "compiled", "long"), headline),
    "brief": (("rivals", "long"), brief),
    "memory": (("memory",), memory),
    "presets": (("long",), presets),
    "preset_steps": (("presets",), preset_steps),
    "others": (("others",), other_steps),
    "kernels": (("kernels",), kernels),
    "pack": (("kernels",), pack),
    "formats": (("formats",), formats),
    "step": (("step",), step),
    "models": (("models",), models),
    "peak": (("timeline",), peak),
    "batch_size": (("batch_size",), batch_size),
    "sensitivity": (("sensitivity",), sensitivities),
    "zoo": (("zoo",), zoo),
    "zoo_causes": (("zoo_causes",), zoo_causes),
    "lightning_tests": (("lightning_tests",), lightning_tests),
    "rivals": (("rivals",), rivals),
    "scaling": (("scaling",), scaling),
    "largest": (("rivals_largest",), largest),
    "compiled": (("compiled",), compiled),
    "graphs": (("compiled_graphs",), graphs),
    "budgets": (("budgets",), budgets),
    "logits": (("logits",), logits),
}
"""Tables by the name of their markers: the result files, and what is made of their records."""


def pages() -> dict[Path, str]:
    """Return the pages that may hold tables."""
    return {path: path.read_text() for path in (README, *sorted(DOCS.glob("*.md")))}


def rendered(texts: Mapping[Path, str], results: Path = RESULTS) -> dict[Path, str]:
    """Return the pages with every table between its markers written anew, if its figures are there.

    Raises:
        ValueError: If a table has no markers, or more than one pair of them, or there are markers for no table.
    """
    found = dict(texts)
    marked = [name for text in texts.values() for name in re.findall(r"<!-- table: (\S+) -->", text)]
    for name in (*TABLES, *marked):
        if name not in TABLES or marked.count(name) != 1:
            raise ValueError(f"There are {marked.count(name)} markers for the table {name!r} of {', '.join(TABLES)}.")
    for name, (files, table) in TABLES.items():
        records = [load(file, results) for file in files]
        if None in records:
            continue
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(?<=\n)(<!-- end table -->)", re.DOTALL)
        text = table(*records)
        for path, page in found.items():
            found[path] = pattern.sub(lambda match, text=text: match[1] + text + "\n" + match[2], page)
    return found


def main() -> int:
    """Rewrite the pages and their pictures, or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = pages()
    after = rendered(before)
    changed = {path: text for path, text in after.items() if text != before[path]}
    if args.check:
        for path in changed:
            print(f"{path.relative_to(ROOT)} is not what the figures say.", file=sys.stderr)
        return int(bool(changed))
    for path, text in changed.items():
        path.write_text(text)
    measured = load("kernels")
    if measured is not None:
        plots.write_pictures(measured, PICTURE)
    steps = load("timeline")
    if steps is not None:
        timeline.draw(steps)
    methods = load("rivals")
    if methods is not None:
        plots.save(plots.frontier_figure(methods, load("compiled") or []), DOCS / "frontier.png", colors=256)
    return 0


if __name__ == "__main__":
    sys.exit(main())
