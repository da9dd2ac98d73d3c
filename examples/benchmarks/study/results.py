"""What the study's records say, as titled tables: runs that may be compared, their scores, and how pruned ones differ.

Runs are of one study if they train the same on the same data; runs of one setting differ by their seed alone.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from examples.benchmarks.study.settings import PRESET
from examples.benchmarks.summaries import Records, Summary, groups

RECIPE = ("task", "model", "dim", "depth", "patch_size", "context", "dataset", "bytes", "sha256", "augmentation")
RECIPE += ("turned", "start", "lora")
RECIPE += ("epochs", "batches", "batch", "lr", "weight_decay", "precision", "compile", "clip")
"""What a training has to share with another for their accuracies to be compared."""
BATCH = ("batches", "batch", "lr")
"""What goes with the batch size."""
LOSS_MARGIN = 0.01
"""Means of a loss count as equal if they differ by so much at most."""


class Score(NamedTuple):
    """How `accuracy` is shown; `sign` is -1 where that is a loss."""

    name: str
    digits: int
    sign: int

    def of(self, records: Records) -> list[float]:
        """Return what is shown of each record."""
        return [self.sign * r["accuracy"] for r in records]


def score_of(record: dict[str, Any]) -> Score:
    """Return what the study of `record` scores."""
    return Score("validation loss", 4, -1) if record["task"] == "gpt" else Score("test accuracy %", 2, 1)


def alike(records: Records, names: Sequence[str]) -> list[Records]:
    """Return `records` by what they say of `names`, in order of appearance; early ones do not say everything."""
    found: dict[tuple[Any, ...], Records] = {}
    for record in records:
        found.setdefault(tuple(record.get(name) for name in names), []).append(record)
    return list(found.values())


def studies(records: Records) -> list[Records]:
    """Return the records of the accuracy study that may be compared, study by study."""
    return alike(records, RECIPE)


def ordered(study: Records) -> Records:
    """Return the runs of a study, dense first and then by what is kept."""
    return sorted(study, key=lambda r: (r["method"] != "dense", -r["bits_per_value"], r["seed"]))


def batch_studies(records: Records) -> list[Records]:
    """Return the records that differ in what goes with the batch size, where there are several sizes."""
    found = alike(records, [name for name in RECIPE if name not in BATCH])
    return [group for group in found if len({r["batch"] for r in group}) > 1]


def main_study(records: Records) -> Records:
    """Return the study of the most settings, of several the one of the most runs."""
    return max(studies(records), key=lambda study: (len(by_setting(study)), len(study)))


def tables(records: Records) -> list[tuple[Summary, Records]]:
    """Return a table of each study and of each comparison of batch sizes, and what records it is made of."""
    return [
        (table(g), g) for select, table in ((studies, accuracy), (batch_studies, batch_sizes)) for g in select(records)
    ]


def by_setting(records: Records) -> dict[str, Records]:
    """Return `records` by what is kept for backward, in words."""
    found: dict[str, Records] = {}
    for record in records:
        found.setdefault(kept(record), []).append(record)
    return found


def kept(record: dict[str, Any]) -> str:
    """Return what a run keeps for backward, in words."""
    if record["method"] == "dense":
        return "dense"
    if record["method"].startswith(PRESET):
        rules = f", {spelled_out(record['others'])}" if record.get("others") else ""
        dropped = f", s = {record['sparsity']:g}" if record.get("sparsity") is not None else ""
        return f"`{record['method'].removeprefix(PRESET)}`, every layer{dropped}{rules}"
    values = "" if record["value_format"] == "same" else f", {record['value_format']}"
    chosen = "" if selection(record) == "largest" else f", {selection(record)}"
    limit = record.get("max_dropped_energy")
    where = "" if limit is None else f" where that drops {100 * limit:.0f} % of the energy at most"
    others = f", other layers in few bits ({spelled_out(record['others'])})" if record.get("others") else ""
    return f"pruned, s = {record['sparsity']:g}{where}, b = {record['block_size']}{values}{chosen}{others}"


def spelled_out(formats: str) -> str:
    """Return the formats of operators as a setting names them, in words."""
    return formats.replace(":", " ").replace(",", ", ")


def selection(record: dict[str, Any]) -> str:
    """Return which blocks are kept: where a record does not say, the largest."""
    return record.get("block_selection") or "largest"


def accuracy(records: Records) -> Summary:
    """One row per setting of one study, mean ± standard deviation over the seeds; differences between like seeds."""
    rows, score, settings = [], score_of(records[0]), by_setting(records)
    for setting, group in settings.items():
        bits = f"{mean_of(group, 'bits_per_value'):.2f}"
        scores = mean_and_deviation(score.of(group), score.digits)
        apart = difference(group, settings.get("dense", []), score)
        losses = mean_and_deviation([r["final_loss"] for r in group], 4)
        rows.append([setting, bits, str(len(group)), scores, apart, losses])
    header = ("method", "bits per value", "seeds", score.name, "difference to dense", "final training loss")
    return Summary(study_title(records[0]), header, rows)


def difference(runs: Records, dense: Records, score: Score) -> str:
    """Return by how much `runs` differ from dense ones of the same seeds."""
    differences = apart(runs, dense, score) if runs[0]["method"] != "dense" else []
    return mean_and_deviation(differences, score.digits, "+") if differences else "-"


def apart(runs: Records, dense: Records, score: Score) -> list[float]:
    """Return the differences of `runs` to dense ones of the same seeds."""
    by_seed = dict(zip((r["seed"] for r in dense), score.of(dense), strict=True))
    return [mine - by_seed[r["seed"]] for r, mine in zip(runs, score.of(runs), strict=True) if r["seed"] in by_seed]


def batch_sizes(records: Records) -> Summary:
    """One row per batch size and pruned setting, for settings that more than one size was trained with."""
    rows, score = [], score_of(records[0])
    sizes = {setting: {r["batch"] for r in runs} for setting, runs in by_setting(records).items()}
    for (batch, lr), group in groups(sorted(records, key=lambda r: r["batch"]), "batch", "lr").items():
        settings = by_setting(group)
        dense = settings.pop("dense", [])
        reference = mean_and_deviation(score.of(dense), score.digits) if dense else "-"
        for setting, runs in settings.items():
            if len(sizes[setting]) > 1:
                scores = mean_and_deviation(score.of(runs), score.digits), difference(runs, dense, score)
                rows.append([str(batch), f"{lr:g}", setting, str(len(runs)), reference, *scores])
    header = ("batch", "learning rate", "method", "seeds", f"{score.name}, dense", f"{score.name}, pruned")
    return Summary(f"{subject(records[0])}, by batch size", (*header, "difference to dense"), rows)


def study_title(record: dict[str, Any]) -> str:
    """Return what the runs of a study train on what and how."""
    training = f"{record['epochs']} epochs of {record['batches']} batches of {record['batch']}, {record['precision']}"
    more = [record["augmentation"]] if record.get("augmentation") else []
    if record.get("start"):
        more += [f"fine-tuned from {record['start']}" + (" by updates of low rank" if record.get("lora") else "")]
    return ", ".join([subject(record), training, *more, *(["compiled"] if record.get("compile") else [])])


def subject(record: dict[str, Any]) -> str:
    """Return which model a study trains on which data."""
    return f"{model(record)} on {data(record)}"


def model(record: dict[str, Any]) -> str:
    """Return what a model is called, by its depth and channels where these are not those of its name."""
    name, depth, dim = record["model"], record.get("depth"), record.get("dim")
    family, _, size = name.rpartition("_")
    known = re.fullmatch(r"(\d+)x(\d+)", size)
    if known:
        return f"{family}_{depth or known[1]}x{dim or known[2]}"
    return name + "".join(f", {word} {value}" for word, value in (("dim", dim), ("depth", depth)) if value)


def data(record: dict[str, Any]) -> str:
    """Return what the data of a study are; of early images only the name of their folder is known."""
    if "bytes" in record:
        return f"{record['dataset']} ({record['bytes']} bytes, {record['sha256']})"
    if "train_images" not in record:
        return record["dataset"]
    shape = f"{record['image_size']} x {record['image_size']} in {record['classes']} classes"
    return f"{record['train_images']} + {record['test_images']} images of {shape} ({record['sha256']})"


def mean_and_deviation(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return the mean and, of more values than one, their standard deviation."""
    mean = f"{statistics.mean(values):{sign}.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def margin(dense: Records) -> float | None:
    """Return how far a mean may be from that of dense to count as equal.

    Of accuracies that is the standard deviation of dense, which is not known of a single run; of losses `LOSS_MARGIN`.
    """
    if score_of(dense[0]).sign < 0:
        return LOSS_MARGIN
    return statistics.stdev(r["accuracy"] for r in dense) if len(dense) > 1 else None


def fewest_bits(records: Records) -> Records:
    """Return the runs of the setting that stores the fewest bits with a mean not below dense by more than the margin.

    One run says little, so it counts only beside a single dense one. The records are of one study; without such a
    setting nothing is returned.
    """
    # Presets of the package are of all layers, and so are their bits.
    settings = by_setting([r for r in records if not r["method"].startswith(PRESET)])
    dense = settings.pop("dense", [])
    allowed = margin(dense) if dense else None
    if allowed is None:
        return []
    least = mean_of(dense, "accuracy") - allowed
    enough = [runs for runs in settings.values() if len(runs) >= min(2, len(dense))]
    equal = [runs for runs in enough if mean_of(runs, "accuracy") >= least]
    return min(equal, key=lambda runs: mean_of(runs, "bits_per_value"), default=[])


def mean_of(records: Records, name: str) -> float:
    """Return the mean of a figure."""
    return statistics.mean(r[name] for r in records)


def fidelity(records: Records) -> Summary:
    """Cosine and norm ratio of pruned weight gradients to the exact ones, per kind of layer."""
    rows = []
    for r in records:
        figures = f"{r['bits_per_value']:.2f}", f"{r['cosine']:.4f}", f"{r['norm_ratio']:.4f}"
        rows.append([f"{r['model']}, {r['kind']}", kept(r), *figures])
    header = ("layers", "method", "bits per value", "cosine", "norm ratio")
    return Summary("Weight gradients of pruned layers beside the exact ones", header, rows)
