"""The benchmark of rivals: what it measures of a small model on the CPU, how it goes on, its tables and its picture."""

from __future__ import annotations

import json
import os
import threading
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from examples.benchmarks import plots, rivals, step_figures, summaries
from examples.benchmarks.common import MIB, in_fork, require_gpu_in_fork
from tests.examples.stand_ins import PEAK, Event
from tests.support.marks import quick

ENVIRONMENT = {"gpu": "GPU", "torch": "2", "triton": "3", "command": "python made_up.py"}
OFFLOADING = """
logger = None
entered = []


class Manager:
    def __enter__(self):
        entered.append(True)

    def __exit__(self, *_):
        entered.append(False)


def get_act_offloading_ctx_manager(model, warn_if_no_head):
    return Manager()
"""


@pytest.fixture
def offload_file(tmp_path):
    path = tmp_path / "offloading.py"
    path.write_text(OFFLOADING)
    return path


class Clock(pl.Callback):
    """Lets time pass on its own clock: a second in each forward, an hour in the last one; ten to synchronise."""

    def __init__(self, monkeypatch, steps):
        self.now, self.steps = 0.0, steps
        monkeypatch.setattr(step_figures.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.passed(10))

    def passed(self, seconds):
        self.now += seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.last = batch_idx == self.steps - 1

    def on_before_zero_grad(self, *_):
        self.passed(3600 if self.last else 1)


@pytest.mark.usefixtures("small_rival")
def test_steps_are_timed_in_a_row_and_the_host_until_one_is_issued_to_an_idle_device(monkeypatch):
    figures = step_figures.StepFigures()
    clock = Clock(monkeypatch, figures.steps - 1)  # after which one is profiled
    rivals.train(rivals.Rival("small", "dense", "cpu"), [clock, figures], figures.steps, "cpu")
    assert figures.issued == [[1000] * step_figures.ALONE]
    assert [len(ended) for ended in figures.ended] == [step_figures.IN_A_ROW + 1]
    # The first of them begins where the device has nothing to do, after a synchronisation, and the last one is slow.
    memory = {"activations_mib": 1.0, "peak_mib": PEAK / MIB, "reserved_mib": 2 * PEAK / MIB}
    times = {"step_ms": 1000, "host_ms": 1000, "in_a_row": step_figures.IN_A_ROW}
    assert figures.found() == {**memory, **times}


def test_a_gpu_is_busy_where_there_is_any_event_of_it():
    spans = [("CUDA", 100, 400), ("CUDA", 300, 350), ("CUDA", 390, 600), ("CPU", 0, 5000), ("CUDA", 900, 1000)]
    events = [
        SimpleNamespace(device_type=getattr(DeviceType, kind), time_range=Interval(start, end))
        for kind, start, end in spans
    ]
    assert step_figures.busy_ms(reversed(events)) == pytest.approx(0.6)
    assert step_figures.busy_ms([]) == 0


class Slower(pl.Callback):
    """Lets steps take longer from turn to turn: 1, 2 and 4 seconds more."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.clock.passed(2.0 ** ((batch_idx - step_figures.WARM_UP) // step_figures.TURN))


@pytest.mark.usefixtures("small_rival")
def test_times_are_medians_over_turns_and_memory_is_that_of_the_first(monkeypatch):
    figures = step_figures.StepFigures(3)
    clock = Clock(monkeypatch, figures.steps)
    rivals.train(rivals.Rival("small", "dense", "cpu"), [clock, Slower(clock), figures], figures.steps, "cpu")
    found = figures.found()
    assert found["step_ms_rounds"] == found["host_ms_rounds"] == [2000, 3000, 5000]
    assert (found["step_ms"], found["activations_mib"]) == (3000, 1.0)
    figures.begin()
    assert (figures.memory, figures.issued) == ({}, [[], [], []])


@pytest.mark.usefixtures("small_rival")
def test_what_compiles_warms_up_before_it_measures_alone(monkeypatch):
    turn = threading.Lock()
    figures = step_figures.Alone(step_figures.Arrivals(1, 2, 60), turn)
    clock = Clock(monkeypatch, figures.steps)
    figures.made = clock.now
    clock.passed(1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rivals.train(rivals.Rival("small", "dense", "cpu"), [clock, figures], figures.steps, "cpu")
    # A second before the fit, a second a step, and until the device has ended the last one.
    assert figures.warm_up_s == 1 + step_figures.WARM_UP + 10
    assert figures.found()["step_ms_rounds"] == [1000, 1000]
    assert turn.acquire(blocking=False)  # the next one


@pytest.mark.usefixtures("small_rival")
@pytest.mark.parametrize("method", quick(["dense", "checkpoint", "offload", "max", "recompute"], "dense", "recompute"))
def test_a_case(method, offload_file):
    alone = step_figures.Alone(step_figures.Arrivals(1, 1, 60), threading.Lock())
    found = rivals.measure("small", method, rivals.EAGER, offload_file, "cpu", alone)
    assert found["step_ms"] > 0
    assert found["host_ms"] > 0
    assert {"activations_mib", "peak_mib"} < found.keys()
    assert ("cosine" in found) == (method not in rivals.OTHERS)
    if method == "max":
        assert 0.99 < found["cosine"] < 1
    if method == "recompute":
        assert 0.99 < found["cosine"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("small_rival")
@pytest.mark.parametrize("method", ["max", "compiler:0.5"])
def test_a_compiled_case(method):
    alone = step_figures.Alone(step_figures.Arrivals(1, 1, 60), threading.Lock())
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        found = rivals.measure("small", method, "default", None, "cpu", alone)
        budget = torch._functorch.config.activation_memory_budget
    assert found["step_ms"] > 0
    assert "warm_up_s" in found
    assert "cosine" not in found
    assert ("packable_mib" in found) == (method == "max")
    assert budget == (0.5 if method == "compiler:0.5" else 1.0)


@pytest.mark.usefixtures("small_rival")
def test_what_is_compared_differs_by_what_is_kept_alone(monkeypatch):
    """Without anything in few bits, the second step is the first one over again: weights, batch, random numbers."""

    def loss(model, x, y):
        return nn.functional.cross_entropy(nn.functional.dropout(model(x)), y)

    monkeypatch.setitem(rivals.WORKLOADS, "small", rivals.WORKLOADS["small"]._replace(loss=loss))
    error = rivals.GradientError()
    rivals.train(rivals.Rival("small", "dense", "cpu"), [error], 2, "cpu")
    assert error.cosine == 1


def test_cosines_are_of_all_gradients_as_one_vector():
    x, y = {"a": torch.ones(2, 3), "b": -torch.ones(4)}, {"a": torch.randn(2, 3), "b": torch.randn(4)}
    flat = [torch.cat([gradients["a"].flatten(), gradients["b"]]) for gradients in (x, y)]
    assert rivals.cosine(x, y) == pytest.approx(torch.cosine_similarity(*flat, dim=0).item(), abs=1e-6)
    assert rivals.cosine(y, y) == pytest.approx(1, abs=1e-12)


def test_offloading_surrounds_forward_and_backward_and_ends_with_an_exception(offload_file):
    offload, module = rivals.Offload(offload_file), pl.LightningModule()
    module.model = nn.Linear(1, 1)
    offload.on_train_start(None, module)
    for end in (offload.on_after_backward, offload.on_exception, offload.on_exception):
        offload.on_train_batch_start(None, module, None, 0)
        end()
        end()
    assert offload.module.entered == [True, False] * 3
    assert offload.module.logger is not None


class Switched(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.asked = []
        setattr(self, name, lambda *options: self.asked.append(options))


def test_checkpointing_is_by_the_switch_of_the_library():
    timm, transformers = Switched("set_grad_checkpointing"), Switched("gradient_checkpointing_enable")
    for model in (timm, transformers):
        rivals.checkpoint(model)
    assert timm.asked == [()]
    assert transformers.asked == [({"use_reentrant": False},)]


@pytest.mark.parametrize(("text", "budget"), [("budget:4GiB", "4GiB"), ("budget:0.5", 0.5)])
def test_a_method_may_name_a_budget(text, budget):
    assert rivals.parsed(["--methods", text, "max"]).methods == [text, "max"]
    assert rivals.budget_of(text) == budget


@pytest.mark.parametrize("text", ["budget:", "budget", "paper", "4GiB"])
def test_other_methods_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        rivals.parsed(["--methods", text])
    assert f"{text!r} is none of dense, checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["compiler:", "compiler:2", "compiler:half"])
def test_budgets_of_compilers_are_shares(text, capsys):
    assert rivals.parsed(["--methods", "compiler:0.5", "--mode", "default"]).methods == ["compiler:0.5"]
    with pytest.raises(SystemExit):
        rivals.parsed(["--methods", text, "--mode", "default"])
    assert f"{text!r} is none of dense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--mode", "default", "--largest", "16"], "--largest is for eager"), (["--methods", "compiler:0.5"], "a --mode")],
)
def test_what_only_one_mode_has_is_refused_in_the_other(more, said, capsys):
    with pytest.raises(SystemExit):
        rivals.parsed(more)
    assert said in capsys.readouterr().err


def test_the_largest_batch_of_offloading_is_searched_only_if_it_is_named():
    assert rivals.parsed([]).methods == list(rivals.METHODS)
    assert rivals.parsed(["--largest", "16"]).methods == [m for m in rivals.METHODS if m != "offload"]
    assert rivals.parsed(["--largest", "16", "--methods", "offload"]).methods == ["offload"]


@pytest.mark.usefixtures("small_rival")
def test_offloading_without_the_file_is_an_error():
    [found] = rivals.run_together([("small", "offload")], rivals.parsed([]))
    assert "--offload-file" in found["error"]


def in_the_middle(number, barred, figures):
    """A case of two turns that says who else is measuring, or fails before it does; the last is slow to warm up."""
    if number == barred:
        raise RuntimeError("no memory is left")
    time.sleep(number)
    found = {"number": number, "warm": time.monotonic(), "alone": True, "began": [], "ended": []}
    for turn in range(figures.turns):
        figures.on_train_batch_start(None, None, None, step_figures.WARM_UP + turn * step_figures.TURN)
        found["alone"] &= not figures.turn.acquire(block=False)
        found["began"].append(time.monotonic())
        time.sleep(0.1)
        found["ended"].append(time.monotonic())
    figures.on_train_end()
    return found


@pytest.mark.usefixtures("small_rival")
@pytest.mark.parametrize("barred", [None, 1])
def test_cases_warm_up_together_take_turns_and_do_not_wait_for_one_that_fails(barred, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = step_figures.in_turns(60, in_the_middle, [(number, barred) for number in range(3)], 2)
    measured = [each for each in found if "error" not in each]
    assert [each["number"] for each in measured] == [number for number in range(3) if number != barred]
    assert all(each["alone"] for each in measured)
    assert min(each["began"][0] for each in measured) >= max(each["warm"] for each in measured)
    assert min(each["began"][1] for each in measured) >= max(each["ended"][0] for each in measured)
    assert sum("no memory is left" in each.get("error", "") for each in found) == (barred is not None)


def that_the_device_fails(figures):
    """A case that the device fails while it measures."""
    figures.on_train_batch_start(None, None, None, step_figures.WARM_UP)
    torch.cuda.synchronize = failing
    torch.cuda.synchronize()


def failing():
    raise RuntimeError("the device has failed")


@pytest.mark.usefixtures("small_rival")
def test_the_others_measure_after_an_error_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = step_figures.in_turns(40, that_the_device_fails, [(), ()])
    assert all("the device has failed" in each["error"] for each in found)


def slow_to_warm_up(number, figures):
    if number:
        time.sleep(3)
    figures.on_train_batch_start(None, None, None, step_figures.WARM_UP)
    return {"number": number, "alone": figures.alone}


@pytest.mark.usefixtures("small_rival")
def test_nobody_waits_longer_for_others_than_a_part_of_the_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(step_figures, "WAITING", 0.05)
    quick_one, slow = step_figures.in_turns(20, slow_to_warm_up, [(0,), (1,)], 1)
    assert (quick_one["number"], slow["number"]) == (0, 1)
    assert (quick_one["alone"], slow["alone"]) == (False, True)


def out_of_memory_at_first(number, figures):
    """A case that runs out of memory while it measures, and measures again in a second fit."""
    figures.on_train_batch_start(None, None, None, step_figures.WARM_UP)
    figures.begin()
    begin = time.monotonic()
    time.sleep(0.2)
    figures.on_train_batch_start(None, None, None, step_figures.WARM_UP)
    end = time.monotonic()
    figures.on_train_end()
    return {"begin": begin, "end": end}


@pytest.mark.usefixtures("small_rival")
def test_a_second_fit_is_alone_from_its_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    one, other = step_figures.in_turns(20, out_of_memory_at_first, [(0,), (1,)], 1)
    assert one["end"] <= other["begin"] or other["end"] <= one["begin"]


@pytest.fixture
def ran(small_rival, monkeypatch):
    """Cases that end at once: a list of those that ran, dense in 10, 20, ... ms, and `max` with an error at first."""
    cases = []

    def run_case(name, method, cap_gib):
        cases.append((name, method))
        if method == "max" and cases.count((name, method)) == 1:
            return {"error": "CUDA out of memory."}
        times = {"step_ms": 10.0 * len(cases), "host_ms": 1.0 * len(cases), "in_a_row": step_figures.IN_A_ROW}
        figures = {"activations_mib": 100.0, "peak_mib": 200.0, **times, **ENVIRONMENT}
        return figures if cap_gib is None else with_batch(figures)

    def run_together(some, args):
        yield from (run_case(*case, args.largest) for case in some)

    monkeypatch.setattr(rivals, "run_together", run_together)
    monkeypatch.setattr(rivals, "require_gpu_in_fork", lambda: None)
    return cases


def with_batch(figures):
    return {**figures, "batch": 60, "trials": 5}


def test_a_record_says_what_was_run_and_where(ran, tmp_path, capsys):
    out = tmp_path / "rivals.json"
    assert rivals.main(["--models", "small", "--methods", "dense", "recompute", "--out", str(out)]) == 0
    assert [method for _, method in ran] == ["dense", "recompute"]
    dense, _ = json.loads(out.read_text())
    assert dense["batch"] == rivals.BATCHES * 2
    assert {"gpu", "torch", "triton", "command", "precision"} < dense.keys()
    assert dense["mode"] == "eager"
    assert "20.00 (+100 %)" in capsys.readouterr().out


def test_modes_are_cases_of_their_own(ran, tmp_path, capsys):
    command = ["--models", "small", "--methods", "dense", "--out", str(tmp_path / "rivals.json")]
    for mode in ("eager", "default", "default", "eager"):
        assert rivals.main([*command, "--mode", mode]) == 0
    assert [r["mode"] for r in json.loads((tmp_path / "rivals.json").read_text())] == ["eager", "default"]
    assert len(ran) == 2
    assert capsys.readouterr().out.count("10.00") > 0


def test_only_cases_of_one_model_warm_up_together(ran, small_rival, monkeypatch, tmp_path):
    monkeypatch.setitem(rivals.WORKLOADS, "other", rivals.WORKLOADS["small"])
    monkeypatch.setattr(rivals, "described", lambda name, batches: {"model": name, "batch": 4})
    groups, run_together = [], rivals.run_together
    monkeypatch.setattr(rivals, "run_together", lambda cases, args: groups.append(cases) or run_together(cases, args))
    command = ["--models", "small", "other", "--methods", "dense", "checkpoint", "recompute", "--together", "2"]
    assert rivals.main([*command, "--out", str(tmp_path / "rivals.json")]) == 0
    assert [[name for name, _ in cases] for cases in groups] == [["small"] * 2, ["small"], ["other"] * 2, ["other"]]


def test_a_second_call_runs_what_is_missing_or_failed(ran, tmp_path, capsys):
    command = ["--models", "small", "--methods", "dense", "max", "--out", str(tmp_path / "rivals.json")]
    assert rivals.main(command) == 1
    assert ran == [("small", "dense"), ("small", "max")]
    assert "CUDA out of memory." in capsys.readouterr().out
    assert rivals.main(command) == 0
    assert ran[2:] == [("small", "max")]
    assert rivals.main(command) == 0
    assert len(ran) == 3


def test_more_turns_are_joined_with_those_that_the_file_has(ran, tmp_path):
    out = tmp_path / "rivals.json"
    command = ["--models", "small", "--methods", "dense", "max", "--out", str(out)]
    for more in ([], ["--again"], ["--again", "--methods", "dense"]):
        rivals.main([*command, *more])
    dense, other = json.loads(out.read_text())
    assert ran == [("small", name) for name in ("dense", "max", "dense", "max", "dense")]
    assert (dense["step_ms_rounds"], dense["host_ms_rounds"]) == ([10.0, 30.0, 50.0], [1.0, 3.0, 5.0])
    assert (dense["step_ms"], dense["samples_per_s"]) == (30.0, round(4 / 30 * 1e3, 1))
    assert other["step_ms"] == 40.0  # of its second turn: the first one was an error


TIMED = {"batch": 4, "in_a_row": 16, "gpu": "A", "torch": "2", "triton": "3", "step_ms": 2.0, "host_ms": 1.0}


@pytest.mark.parametrize("other", [{"gpu": "B"}, {"torch": "3"}, {"batch": 8}, {"in_a_row": None}, {"step_ms": None}])
def test_turns_of_something_else_are_not_joined(other):
    assert step_figures.joined({**TIMED, **other}, TIMED) == TIMED


def test_an_error_replaces_an_error_alone():
    error, later = {"error": "no memory"}, {"error": "no time"}
    assert step_figures.joined(TIMED, error) == TIMED
    assert step_figures.joined(error, TIMED) == TIMED
    assert step_figures.joined(error, later) == later


def test_no_case_starts_after_the_time_is_up(ran, tmp_path):
    assert rivals.main(["--models", "small", "--seconds", "0", "--out", str(tmp_path / "rivals.json")]) == 0
    assert ran == []


def test_largest_batches_are_cases_of_their_own_and_so_are_settings_of_the_allocator(
    ran, tmp_path, capsys, monkeypatch
):
    command = ["--models", "small", "--methods", "dense", "recompute", "--out", str(tmp_path / "rivals.json")]
    monkeypatch.delenv(rivals.ALLOCATOR, raising=False)
    for more in ([], ["--largest", "16"], ["--largest", "16"]):
        assert rivals.main([*command, *more]) == 0
    assert len(ran) == 4
    monkeypatch.setenv(rivals.ALLOCATOR, "expandable_segments:True")
    assert rivals.main([*command, "--largest", "16"]) == 0
    assert len(ran) == 6
    records = json.loads((tmp_path / "rivals.json").read_text())
    assert [(r.get("cap_gib"), r["batch"]) for r in records] == [(None, 4)] * 2 + [(16.0, 60)] * 4
    assert [r.get("allocator") for r in records] == [None] * 4 + ["expandable_segments:True"] * 2
    assert "small, 16 GiB, expandable_segments:True" in capsys.readouterr().out


@pytest.mark.slow
def test_the_largest_batch_comes_with_its_figures(small_rival, monkeypatch):
    def loss(model, x, y):
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.cross_entropy(model(x), y)

    monkeypatch.setitem(rivals.WORKLOADS, "small", rivals.WORKLOADS["small"]._replace(loss=loss))
    alone = step_figures.Alone(step_figures.Arrivals(1, 1, 60), threading.Lock())
    found = rivals.measure_largest("small", "balanced", None, 1.0, "cpu", alone)
    assert (found["batch"], found["trials"]) == (3, 4)
    assert alone.arrived
    assert rivals.with_speed(found)["samples_per_s"] == pytest.approx(3e3 / found["step_ms"], abs=0.1)


@pytest.mark.parametrize(("enough", "tried"), [(60, [64, 62, 60]), (0, [3, 2, 1])])
def test_a_batch_that_lasts_for_a_few_steps_alone_gives_way_to_a_smaller_one(small_rival, monkeypatch, enough, tried):
    asked = []

    def fit(self, batch, figures, steps):
        asked.append(batch)
        assert steps == figures.steps == step_figures.WARM_UP + step_figures.TURN + 1
        if batch > enough:
            return None
        figures.issued, figures.ended = [[1.0]], [[Event(time=seconds) for seconds in (1.0, 1.002)]]
        return 1.0

    monkeypatch.setattr(rivals, "search", lambda case, *_: tried[0])
    monkeypatch.setattr(rivals.Case, "fit", fit)
    alone = step_figures.Alone(step_figures.Arrivals(1, 1, 60), threading.Lock())
    found = rivals.measure_largest("small", "balanced", None, 1.0, "cpu", alone)
    assert asked == tried
    assert found["batch"] == enough
    assert rivals.with_speed(found)["samples_per_s"] == (pytest.approx(30000) if enough else None)


def test_table_of_largest_batches():
    head = {"model": "net", "cap_gib": 16.0, **ENVIRONMENT}
    records = [
        {**head, "method": "dense", "batch": 20, "samples_per_s": 100.0, "peak_mib": 10.0},
        {**head, "method": "max", "batch": 50, "samples_per_s": 90.0, "peak_mib": 12.0},
        {**head, "method": "checkpoint", "batch": 128, "error": "took over 240 s"},
        {**head, "model": "huge", "method": "dense", "batch": 0, "samples_per_s": None, "peak_mib": None},
        {**head, "model": "huge", "method": "max", "batch": 4, "samples_per_s": 1.0, "peak_mib": 9.0},
    ]
    rows = rivals.largest_batches(records).rows
    assert rows[1] == ["net, 16 GiB", "max", "50 (+150 %)", "90.0 (-10 %)", "12 (+20 %)"]
    assert rows[2][2:] == ["took over 240 s", "-", "-"]
    assert rows[3:] == [["huge, 16 GiB", "dense", "0", "-", "-"], ["huge, 16 GiB", "max", "4", "1.0", "9"]]


def frontier_record(method, activations, milliseconds, cosine=None, model="net"):
    memory = {"activations_mib": activations, "peak_mib": 2 * activations}
    times = {"step_ms": milliseconds, "host_ms": 7.0, "samples_per_s": 64.0}
    return {"model": model, "method": method, **memory, **times, "cosine": cosine}


FRONTIER = [
    frontier_record("dense", 400.0, 10.0),
    frontier_record("max", 100.0, 11.0, 0.99),
    frontier_record("budget:0.1", 40.0, 12.0, 0.9),
    frontier_record("budget:0.3", 120.0, 10.0, 1.0),
    {"model": "net", "method": "offload", "error": "took over 120 s"},
    frontier_record("max", 50.0, 5.0, 0.5, model="without dense"),
]


def test_table_of_the_frontier():
    rows = summaries.frontier(FRONTIER).rows
    assert rows[0] == ["net", "dense", "400", "800", "10.00", "10.00", "7", "64", "-"]
    times = "11.00 (+10 %)", "11.00 (+10 %)"
    assert rows[1] == ["net", "max", "100 (-75 %)", "200 (-75 %)", *times, "7", "64", "1.0e-02"]
    assert rows[4] == ["net", "offload", "took over 120 s", *"------"]
    assert rows[5] == ["without dense", "max", "50", "100", "5.00", "5.00", "7", "64", "5.0e-01"]


def test_the_time_of_the_gpu_has_a_column_where_it_was_measured():
    first, second = {**FRONTIER[0], "gpu_ms": 9.4}, FRONTIER[1]
    summary = summaries.frontier([first, second, FRONTIER[4]])
    assert summary.header[6:] == ("host's ms", "GPU's ms", "samples a second", "1 - cosine")
    assert [row[6:] for row in summary.rows] == [["7", "9", "64", "-"], ["7", "-", "64", "1.0e-02"], ["-"] * 4]


def test_times_are_of_the_quickest_turn_and_of_the_median():
    dense = {**frontier_record("dense", 400.0, 10.0), "step_ms_rounds": [10.0, 9.0, 12.0]}
    ours = {**frontier_record("max", 100.0, 14.0), "step_ms_rounds": [9.9, 15.0, 14.0]}
    assert summaries.frontier([dense, ours]).rows[1][4:6] == ["14.00 (+40 %)", "9.90 (+10 %)"]
    assert summaries.time_change(ours, dense) == "+10 to +40 %"
    assert summaries.time_change({**ours, "step_ms": 9.0}, dense) == "-10 to +10 %"
    assert summaries.time_change({**ours, "step_ms": 11.0}, dense) == "+10 %"


def test_picture_of_the_frontier(tmp_path):
    pytest.importorskip("matplotlib", reason="only pictures need it")
    compiled = [frontier_record("dense", 300.0, 8.0), frontier_record("max", 50.0, 9.0)]
    compiled.append(frontier_record("compiler:0.5", 200.0, 8.5))
    figure = plots.frontier_figure(FRONTIER, compiled)
    (panel,) = figure.axes
    assert panel.get_title() == "net"
    line = panel.lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0.1, 0.3], [1.2, 1.0])
    assert [text.get_text() for text in panel.texts] == ["0.1", "0.3"]
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"memory_budget", "max", "dense", "compiler:0.5"}
    dots = [
        (*dot.get_xdata(), *dot.get_ydata(), dot.get_fillstyle()) for dot in panel.lines if len(dot.get_xdata()) == 1
    ]
    assert dots[-3:] == [(0.125, 0.9, "none"), (0.5, 0.85, "none"), (0.75, 0.8, "none")]
    assert panel.get_yscale() == panel.get_xscale() == "log"
    plots.save(figure, tmp_path / "frontier.png", colors=256)
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_a_case_runs_in_a_process_of_its_own():
    kept = []

    def case(number):
        kept.append(number)
        return {"number": number}

    found = in_fork(30, case, 3)
    assert found["number"] == 3
    assert found["torch"] == torch.__version__
    assert kept == []


def test_errors_of_a_process_are_its_record():
    def raises():
        raise ValueError("made up\nby a test")

    def ends():
        raise SystemExit("made up")

    errors = "ValueError: made up", "SystemExit: made up", "took over 0.2 s", "exit status 3"
    cases = (30, raises), (30, ends), (0.2, time.sleep, 30), (30, os._exit, 3)
    for case, error in zip(cases, errors, strict=True):
        found = in_fork(*case)
        assert found["error"] == error
        assert {"gpu", "torch", "triton", "command"} < found.keys()


def test_without_a_gpu_the_program_ends_with_a_hint(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        require_gpu_in_fork()


def test_table_of_budgets():
    head = {"model": "net", "batch": 4, "method": "budget:0.3"}
    sizes = {"budget_mib": 300.0, "predicted_mib": 200.0, "peak_mib": 195.0, "activations_mib": 50.0}
    error = "MisconfigurationException: `memory_budget` is less than a step takes at the least, 95 MiB: parameters"
    refused = {**head, "method": "budget:0.1", "error": error}
    rows = summaries.budgets([{**head, **sizes}, refused]).rows
    assert rows[0] == ["net, batch 4", "0.3", "300", "200", "195", "-2.5 %", "50", "-"]
    assert rows[1] == ["net, batch 4", "0.1", "-", "refused: a step takes 95 MiB", *["-"] * 4]
    dense = {**head, "method": "dense", "peak_mib": 900.0, "activations_mib": 500.0, "step_ms": 10.0}
    rows = summaries.budgets([dense, refused, {**head, **sizes, "step_ms": 12.0}]).rows
    assert rows[0] == ["net, batch 4", "dense", "-", "-", "900", "-", "500", "10.0"]
    assert rows[2][-1] == "12.0 (+20 %)"
