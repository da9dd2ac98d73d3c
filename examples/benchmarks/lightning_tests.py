"""Run Lightning's own tests with our callbacks in every Trainer, and compare with the same tests without them.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python examples/benchmarks/lightning_tests.py --lightning pytorch-lightning --out lightning_tests.json
    python examples/benchmarks/lightning_tests.py --lightning pytorch-lightning --only tuner callbacks

The checkout gives the tests, of which those run that need a CPU only; the Lightning that they import is the installed
one, so both should have the same version. The tests need pytest-rerunfailures, pytest-random-order and cloudpickle;
those of psutil, pandas, scikit-learn, onnx and tensorboard are skipped or fail without these, in all runs alike. Our
callbacks get into the Trainers by Lightning's entry point for callbacks, which the tests' processes alone see. Runs:

``without``
    The tests as they are.
``exact``
    With every linear layer and convolution converted at sparsity 0, which trains as the dense model does, bit for bit.
``max``
    With the preset ``max`` for every layer, however small.

Lightning has thousands of tests, of which ``--every trainer=4`` runs every fourth of the folder, and
``--select "not legacy and not ddp and not spawn"`` none that wants files of older versions or trains in several
processes, the same in all runs. Each folder of a run leaves a file in ``--work``, and what is there is not run again:
another selection wants another folder. A test that passes without the callbacks and fails with them is run once more;
one that passes then is not counted. The exit status is 1 if a test fails only with our callbacks and ``REASONS`` does
not say why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import RESULTS, environment, write_records
from examples.benchmarks.summaries import Record, Records, Summary, groups

if TYPE_CHECKING:
    from lightning.pytorch import Callback

ROOT = RESULTS.parents[2]
FOLDERS = ("tuner", "checkpointing", "callbacks", "loops", "models", "trainer", "strategies")
RUNS = ("without", "exact", "max")
NEW = "new"
"""The reason of a failure that ``REASONS`` does not know."""
_LOGS = "compares all that is logged; the monitor logs `actprune/*`, too"
_LIST = "gives one list of callbacks to several Trainers; Lightning adds those of the entry point to the list itself"
_CLASS = "compares the names of layers' classes, which converted layers have other ones of"
_ORDER = "compares the list of callbacks"
REASONS: dict[str, str] = {
    "callbacks/test_device_stats_monitor.py::test_device_stats_cpu*": _LOGS,
    "callbacks/test_finetuning_callback.py::test_callbacks_restore": _LIST,
    "callbacks/test_model_summary.py::test_custom_model_summary_callback_summarize": _CLASS,
    "callbacks/test_pruning.py::test_multiple_pruning_callbacks*": _CLASS,
    "callbacks/test_throughput_monitor.py::test_throughput_monitor_*": _LOGS,
    "checkpointing/test_model_checkpoint.py::test_checkpoint_repeated_strategy_extended": _LIST,
    "loops/test_training_loop_flow_scalar.py::test__training_step__epoch_end__flow_scalar": _LOGS,
    "models/test_restore.py::test_load_model_from_checkpoint*": _LIST,
    "models/test_restore.py::test_model_properties_fit_ckpt_path": _LIST,
    "models/test_restore.py::test_running_test_pretrained_model_cpu": _LIST,
    "trainer/connectors/test_callback_connector.py::test_attach_model_callbacks": _ORDER,
    "trainer/connectors/test_callback_connector.py::test_checkpoint_callbacks_are_last": _ORDER,
    "trainer/connectors/test_checkpoint_connector.py::test_loops_restore": _LIST,
    "trainer/flags/test_fast_dev_run.py::test_callbacks_and_logger_not_called_with_fastdevrun*": _LIST,
    "trainer/logging_/test_distributed_logging.py::test_logger_after_fit_predict_test_calls": _LOGS,
    "trainer/logging_/test_eval_loop_logging.py::test__validation_step__epoch_end__log": _LOGS,
    "trainer/logging_/test_eval_loop_logging.py::test__validation_step__log": _LOGS,
    "trainer/logging_/test_eval_loop_logging.py::test_eval_epoch_logging*": _LOGS,
    "trainer/logging_/test_eval_loop_logging.py::test_eval_float_logging": _LOGS,
    "trainer/logging_/test_eval_loop_logging.py::test_eval_logging_auto_reduce": _LOGS,
    "trainer/logging_/test_eval_loop_logging.py::test_validation_step_log_with_tensorboard": _LOGS,
    "trainer/logging_/test_logger_connector.py::test_logged_metrics_has_logged_epoch_value*": _LOGS,
    "trainer/logging_/test_train_loop_logging.py::test__training_step__epoch_end__log": _LOGS,
    "trainer/logging_/test_train_loop_logging.py::test__training_step__log": _LOGS,
    "trainer/logging_/test_train_loop_logging.py::test_different_batch_types_for_sizing": _LOGS,
    "trainer/logging_/test_train_loop_logging.py::test_log_on_train_start": _LOGS,
    "trainer/logging_/test_train_loop_logging.py::test_logging_in_callbacks_with_log_function": _LOGS,
    "trainer/logging_/test_train_loop_logging.py::test_on_epoch_logging_with_sum_and_on_batch_start": _LOGS,
    "trainer/optimization/test_manual_optimization.py::test_multiple_optimizers_manual_log": _LOGS,
}
"""Why tests fail with our callbacks, by patterns on their names; the first that matches counts."""
_EVERY = "ACTPRUNE_ONE_TEST_IN"
_GROUP = "lightning.pytorch.callbacks_factory"
_WORST = ("passed", "skipped", "failed")


def exact() -> list[Callback]:
    """Return what every Trainer gets in the run ``exact``.

    The preset covers what no layer is known for, too, so that a model without any layer is not refused; tensors as
    small as those of the tests are left alone by that. Layers that read the batch stay converted.
    """
    from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep

    pruning = ActivationPruning("balanced", rules={"*": Keep()}, skip_retained=False, verbose=False)
    return [pruning, ActivationMemoryMonitor(verbose=False)]


def most() -> list[Callback]:
    """Return what every Trainer gets in the run ``max``."""
    from lightning_actprune import ActivationMemoryMonitor, ActivationPruning

    pruning = ActivationPruning("max", rules={"*": "max"}, verbose=False)
    return [pruning, ActivationMemoryMonitor(verbose=False)]


_FACTORIES = {"exact": exact, "max": most}


class Tests(NamedTuple):
    """Where the tests are, and how they are run."""

    folder: Path
    work: Path
    limit_s: int
    workers: int
    every: Mapping[str, int]
    select: str


def register(run: str, folder: Path) -> None:
    """Write what pip would install of a package whose entry point adds the callbacks of ``run`` to Trainers."""
    info = folder / "actprune_in_every_trainer-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: actprune_in_every_trainer\nVersion: 1\n")
    where = f"examples.benchmarks.lightning_tests:{_FACTORIES[run].__name__}"
    (info / "entry_points.txt").write_text(f"[{_GROUP}]\nactprune = {where}\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave tests out where this module is a plugin of pytest, as it is in the processes that run one in so many."""
    items[:] = items[:: int(os.environ[_EVERY])]


def run_pytest(tests: Tests, run: str, names: Sequence[str], results: Path, every: int = 1) -> None:
    """Run one in ``every`` of the tests and write their results, in processes that survive tests that end theirs.

    Raises:
        RuntimeError: If pytest has not come to its end.
    """
    unfinished = results.with_suffix(".part")
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-n", str(tests.workers), "--dist", "worksteal"]
    options += ["--timeout", str(tests.limit_s), "--junitxml", str(unfinished)]
    options += ["-k", tests.select] if tests.select else []
    with tempfile.TemporaryDirectory() as temporary:
        places = [str(tests.folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if run in _FACTORIES:
            register(run, Path(temporary))
            places.append(temporary)
        if every > 1:
            options += ["-p", f"examples.benchmarks.{Path(__file__).stem}"]
        own = {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with results.with_suffix(".txt").open("w") as output:
            status = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *names],
                cwd=tests.folder,
                env={**os.environ, **own, _EVERY: str(every)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
    if status not in (0, 1, 5) or not unfinished.is_file():  # all passed, some failed, there were none
        raise RuntimeError(f"pytest ended with status {status}, see {output.name}")
    unfinished.replace(results)


def outcomes(results: Path, folder: Path) -> dict[str, str]:
    """Return what became of each test, ``passed``, ``skipped`` or ``failed``, by the name that pytest takes.

    Args:
        results: A file that pytest wrote with ``--junitxml``.
        folder: What the names are relative to.
    """
    found: dict[str, str] = {}
    for case in ET.parse(results).iter("testcase"):  # noqa: S314 - pytest's own file
        name = node_id(case.get("classname", ""), case.get("name", ""), folder)
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        # A test that passes and fails while it cleans up is there twice.
        found[name] = max(outcome, found.get(name, "passed"), key=_WORST.index)
    return found


def node_id(classname: str, name: str, folder: Path) -> str:
    """Return the name that pytest takes of a test that its results call ``a.test_b.TestC`` and ``test_d``."""
    # Names begin at the checkout, where Lightning's settings of pytest are, and not at the folder that pytest runs in.
    parts = [*filter(None, classname.removeprefix(f"{folder.name}.").split("."))]
    for number in range(1, len(parts) + 1):
        path = Path(*parts[:number]).with_suffix(".py")
        if (folder / path).is_file():
            return "::".join([path.as_posix(), *parts[number:], name])
    return name.removeprefix(f"{folder.name}.")  # a file that could not be imported


def run_folder(tests: Tests, run: str, name: str) -> dict[str, str]:
    """Return what became of the tests of a folder, which are run unless that is known already."""
    every = tests.every.get(name, 1)
    results = tests.work / run / f"{name}{f'_one_in_{every}' if every > 1 else ''}.xml"
    results.parent.mkdir(parents=True, exist_ok=True)
    if not results.is_file():
        run_pytest(tests, run, [f"tests_pytorch/{name}"], results, every)
    return outcomes(results, tests.folder)


def run_again(tests: Tests, run: str, name: str, failed: Sequence[str]) -> dict[str, str]:
    """Return the tests that passed when they were run once more, as far as they can be run one by one."""
    results = tests.work / run / f"{name}_again.xml"
    known = outcomes(results, tests.folder) if results.is_file() else {}
    chosen = [test for test in failed if ".py::" in test]
    if not known.keys() >= set(chosen):
        run_pytest(tests, run, chosen, results)
        known = outcomes(results, tests.folder)
    return {test: "passed" for test in chosen if known.get(test) == "passed"}


def only_with(without: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the tests that pass without the callbacks and fail with them."""
    return [name for name, outcome in found.items() if outcome == "failed" and without.get(name) == "passed"]


def reason(test: str) -> str:
    """Return why a test fails with our callbacks."""
    return next((why for pattern, why in REASONS.items() if fnmatchcase(test, pattern)), NEW)


def compare(tests: Tests, name: str, runs: Sequence[str]) -> Iterator[Record]:
    """Yield what there is to say of a folder: a record of each run, and of each test that fails only with callbacks."""
    without: dict[str, str] = {}
    for run in runs:
        found = run_folder(tests, run, name)
        without = without or found
        found |= run_again(tests, run, name, only_with(without, found))
        counts, every = Counter(found.values()), tests.every.get(name, 1)
        yield {"folder": name, "run": run, "every": every, **{outcome: counts[outcome] for outcome in _WORST}}
        for test in sorted(only_with(without, found)):
            short = test.removeprefix("tests_pytorch/")
            yield {"folder": name, "run": run, "test": short, "reason": reason(short)}


def facts(checkout: Path) -> dict[str, Any]:
    """Return versions, hardware and command: part of every record."""
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    asked = subprocess.run(git, capture_output=True, text=True)
    version = checkout / "src" / "version.info"
    return {
        "lightning": importlib.metadata.version("lightning"),
        "tests_of": version.read_text().strip() if version.is_file() else None,
        "tests_commit": asked.stdout.strip() or None,
        "python": platform.python_version(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        **environment(),
    }


def counted(records: Records) -> Summary:
    """Return how many tests of each folder pass and fail in each run."""
    header, rows = ["folder", "tests run"], []
    runs = list(dict.fromkeys(record["run"] for record in records))
    header += [f"pass, {run}" for run in runs] + [f"fail only with {run}" for run in runs[1:]]
    for (folder,), group in groups(records, "folder").items():
        of = {record["run"]: record for record in group if "test" not in record}
        fails = Counter(record["run"] for record in group if "test" in record)
        tests = sum(of[runs[0]][outcome] for outcome in _WORST)
        cells = [str(of[run]["passed"]) if run in of else "-" for run in runs]
        part = f" (one in {of[runs[0]]['every']})" if of[runs[0]]["every"] > 1 else ""
        rows.append([folder + part, str(tests), *cells, *(str(fails[run]) if run in of else "-" for run in runs[1:])])
    return Summary("Lightning's own tests", header, rows)


def shown(records: Records, name: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names and the figures of what is printed of a folder when it is done."""
    summary = counted([record for record in records if record["folder"] == name])
    return summary.header, summary.rows[0]


def causes(records: Records) -> Summary:
    """Return why tests fail only with the callbacks, and how many in each run."""
    failing = [record for record in records if "test" in record]
    runs = [run for run in dict.fromkeys(record["run"] for record in records) if run != RUNS[0]]
    rows = []
    for (why,), group in groups(failing, "reason").items():
        counts = Counter(record["run"] for record in group)
        rows.append([why, *(str(counts[run]) for run in runs)])
    rows.sort(key=lambda row: -max(map(int, row[1:])))
    return Summary("Why tests fail only with the callbacks", ["why", *runs], rows)


def share(text: str) -> tuple[str, int]:
    """Return the name and the number of ``name=number``, for the command line."""
    name, _, number = text.partition("=")
    if name not in FOLDERS or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(FOLDERS)}, '=' and a positive number, got {text}")
    return name, int(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the folders that are asked for, write the records, and print what is new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lightning", type=Path, required=True, help="a checkout of Lightning's repository")
    parser.add_argument("--only", nargs="+", default=list(FOLDERS), metavar="FOLDER", help="of tests/tests_pytorch")
    parser.add_argument("--runs", nargs="+", default=list(RUNS[1:]), choices=RUNS[1:], help="beside `without`")
    parser.add_argument("--every", nargs="+", default=[], type=share, metavar="FOLDER=N", help="run one test in N")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="which tests, as pytest's -k takes it")
    parser.add_argument("--timeout", type=int, default=60, help="seconds of a test")
    parser.add_argument("--workers", type=int, default=1, help="tests at a time")
    parser.add_argument("--work", type=Path, default=Path("lightning_tests"), help="folder of the results")
    parser.add_argument("--out", type=Path, default=Path("lightning_tests.json"))
    args = parser.parse_args(arguments)
    folder = args.lightning.resolve() / "tests"
    missing = [name for name in args.only if not (folder / "tests_pytorch" / name).is_dir()]
    if missing:
        parser.error(f"there is no {missing[0]} in {args.lightning / 'tests' / 'tests_pytorch'}")
    tests = Tests(folder, args.work.resolve(), args.timeout, args.workers, dict(args.every), args.select)
    about, records = facts(args.lightning), []
    for name in args.only:
        records += [record | about for record in compare(tests, name, [RUNS[0], *args.runs])]
        write_records(args.out, records)
        print(", ".join(map(" ".join, zip(*shown(records, name), strict=True))), flush=True)
    new = [record for record in records if record.get("reason") == NEW]
    for record in new:
        print(f"fails only with {record['run']}: {record['test']}")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
