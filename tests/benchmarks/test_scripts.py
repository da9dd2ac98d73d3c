"""Each measuring script runs at its smallest on a CPU, and its records say what they should."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import bench_batch_size, bench_kernels, common, tune
from benchmarks.common import RecordFile
from tests.support.marks import only

pytestmark = pytest.mark.integration


def records_of(tmp_path, script, *arguments):
    out = tmp_path / "records.json"
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = json.loads(out.read_text())
    assert all(record["torch"] == torch.__version__ and f"{script}.py" in record["command"] for record in records)
    return records


# === Steps ============================================================================================


@pytest.mark.nightly
def test_steps_of_methods_side_by_side(tmp_path):
    methods = ["dense", "checkpoint", "max", "linear:s0.5:b16", "rounded", "budget:0.99"]
    records = records_of(tmp_path, "bench_step", "--together", "6", "--methods", *methods)
    found = {record["method"]: record for record in records}
    assert list(found) == methods
    assert all(r["step_ms"] > 0 and r["host_ms"] > 0 and r["samples_per_s"] > 0 for r in records)
    budget = found.pop("budget:0.99")
    assert budget["predicted_mib"] <= budget["budget_mib"] < budget["predicted_dense_mib"]
    kept = {method: record["accounted_mib"] for method, record in found.items()}
    assert max(kept["max"], kept["checkpoint"]) < 0.5 * kept["dense"]
    assert kept["linear:s0.5:b16"] < kept["dense"] == kept["rounded"]
    assert found["linear:s0.5:b16"]["loss_off"] == 0 < found["rounded"]["loss_off"] < 0.01
    assert 0.01 < found["linear:s0.5:b16"]["error"] < 1
    assert 0 < found["rounded"]["error"] < 0.01
    assert "cosine" not in found["checkpoint"]


@pytest.mark.nightly
def test_steps_on_two_devices(tmp_path):
    arguments = "--table", "gpus", "--devices", "2", "--strategies", "fsdp2", "--methods", "max"
    [record] = records_of(tmp_path, "bench_step", *arguments)
    assert (record["table"], record["strategy"], record["devices"]) == ("gpus", "fsdp2", 2)
    assert record["samples_per_s"] == round(2 * record["batch"] / record["step_ms"] * 1e3, 1)


@pytest.mark.nightly
def test_compiled_steps(tmp_path):
    arguments = "--table", "compiled", "--mode", "aot_eager", "--methods", "max"
    [record] = records_of(tmp_path, "bench_step", *arguments)
    assert 0 < record["packed_mib"] < 0.5 * record["packable_mib"]
    assert record["warm_up_s"] > 0


@pytest.mark.nightly
def test_the_memory_of_a_step_over_time(tmp_path):
    [record] = records_of(tmp_path, "bench_step", "--timeline", "--methods", "max")
    assert len(record["phases"]) == len(record["series_mib"]["in use"]) > 10


@pytest.mark.nightly
def test_language_models(tmp_path):
    methods = ["dense", "recompute:8:offload"]
    records = records_of(tmp_path, "bench_text", "--steps", "1", "--methods", *methods)
    assert [record["method"] for record in records] == methods
    assert records[1]["loss"] == pytest.approx(records[0]["loss"], rel=1e-3)
    assert all(record["step_s"] > 0 for record in records)


# === Batches, kernels, constants ======================================================================


@pytest.mark.parametrize(("axis", "field"), only([("batch", "batch"), ("depth", "size")], ("batch", "batch")))
@pytest.mark.nightly
def test_the_largest_batch_and_model(axis, field, tmp_path):
    [record] = records_of(tmp_path, "bench_batch_size", "--axis", axis, "--methods", "max")
    assert record[field] == bench_batch_size.QUICK_LARGEST
    assert record["trials"] < 6
    assert record["step_ms"] > 0


@pytest.mark.parametrize("start", [1, 64, 1000])
@pytest.mark.parametrize("limit", [0, 1, 63, 65, 700, bench_batch_size.LARGEST])
def test_the_largest_size_is_found_to_one_in_32(start, limit):
    tried = []
    found = bench_batch_size.largest(lambda size: tried.append(size) or size <= limit, start)
    assert found <= limit < found + max(2, 2 * found // 32)
    assert len(tried) == len(set(tried)) < 25


def test_kernels(tmp_path):
    out = tmp_path / "kernels.json"
    bench_kernels.main(["--quick", "--out", str(out)])
    records = json.loads(out.read_text())
    assert {record["kind"] for record in records} == set(bench_kernels.KINDS)
    assert all(value > 0 for record in records for key, value in record.items() if key in ("pack_us", "us", "dense_us"))
    stored = {r["value_format"]: r["stored_bytes"] for r in records if r["kind"] == "format" and r["sparsity"] == 0}
    assert stored["int2"] < stored["int4"] < stored["int8"] < stored["same"]
    for kind in ("activation", "norm"):
        layers = [r for r in records if r["kind"] == kind and r.get("function") != "relu"]
        kept = {r["value_format"]: r["kept_bytes"] for r in layers}
        assert kept["int2"] < kept["int4"] < kept["int8"] < kept["dense"]
    errors = {(r["logit_std"], r["stored"]): r["error"] for r in records if r["kind"] == "attention"}
    assert errors[1.0, ""] < 0.01 < errors[8.0, "query, key"]


def test_constants(tmp_path):
    out = tmp_path / "tune.json"
    tune.main(["costs", "--out", str(out)])
    tune.main(["features", "--quick", "--out", str(out)])
    costs, features = ([r for r in json.loads(out.read_text()) if r["kind"] == kind] for kind in ("costs", "features"))
    assert [r["itemsize"] for r in costs] == [2, 4]
    assert all(1 <= r["worst_fitted"] < 1.2 for r in costs)
    assert [r["features"] for r in features] == [16, 64]
    assert all(r["pruned_us"] > 0 for r in features)


# === Records and processes ============================================================================


def test_what_a_file_has_is_not_run_again_unless_it_failed(tmp_path):
    file = RecordFile(tmp_path / "records.json", ("kind", "case"))
    for case, figures in (([1, 2], {"us": 3}), ([1, 3], {"error": "broken"}), ([1, 4], {"error": 0.1})):
        file.add({"kind": "a", "case": case, **figures})
    again = RecordFile(file.path, file.keys)
    assert [again.lacks({"kind": "a", "case": [1, n]}) for n in (2, 3, 4, 5)] == [False, True, False, True]
    assert RecordFile(file.path, file.keys, again=True).lacks({"kind": "a", "case": [1, 2]})
    assert len(file.path.read_text().splitlines()) == 5


# === Zoo ==============================================================================================


@pytest.mark.foreign
def test_the_zoo(tmp_path):
    records = records_of(tmp_path, "bench_zoo", "--models", "timm/test_vit", "*GPT2LMHeadModel", "--workers", "2")
    assert {record["zoo"] for record in records} == {"timm", "transformers"}
    for record in records:
        assert record["max_kib"] < record["balanced_kib"] < 0.5 * record["kib"]
        assert 0.9 < record["max_cosine"] < record["balanced_cosine"] < 1
        assert not {"balanced_left", "max_left"} & record.keys()
