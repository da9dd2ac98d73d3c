"""The program that the sanitizers watch, unwatched, and how their reports are read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels import sanitize
from tests.support.workload import kernel_names, run_all


@pytest.mark.slow
def test_workload_launches_every_kernel_with_right_results(kernel_device):
    assert set(run_all(kernel_device)) == kernel_names() >= {"unpack_kernel", "weight_grad_kernel"}


@pytest.mark.parametrize(
    ("report", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= ERROR SUMMARY: 12 errors\n========= ERROR SUMMARY: 10 errors were not printed.", 12),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", 3),
        ("========= Error: Device not supported", None),
    ],
)
def test_reports_are_counted(report, errors):
    assert sanitize.errors_in(report) == errors


FAKE = """#!{python}
import subprocess, sys
if "--help" not in sys.argv:
    tool, separator, child = sys.argv[2], sys.argv.index("-m"), None
    print("ran under the watch: {ran}")
    print("{summary}")
    sys.exit({code})
"""


@pytest.mark.parametrize(
    ("summary", "ran", "code", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors", "unpack_kernel", 0, sanitize.CLEAN),
        ("========= ERROR SUMMARY: 2 errors", "unpack_kernel", 0, sanitize.FOUND),
        ("========= Error: Device not supported", "", 0, sanitize.BROKEN),
        ("========= ERROR SUMMARY: 0 errors", "unpack_kernel", 1, sanitize.BROKEN),
    ],
)
def test_outcome_of_a_tool_is_its_exit_code(tmp_path, capfd, summary, ran, code, expected):
    program = tmp_path / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable, summary=summary, ran=ran, code=code))
    program.chmod(0o755)
    child = [sys.executable, "-m", "tests.kernels.sanitize", "--run"]
    assert sanitize.watched(program, "memcheck", child) == expected
    assert capfd.readouterr().out.splitlines()[-1].startswith("memcheck: ")


def test_without_the_program_the_script_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "candidates", lambda: iter(()))
    assert sanitize.check(["memcheck"]) == sanitize.MISSING
    assert "not found" in capsys.readouterr().out


def test_program_in_a_toolkit_is_found(monkeypatch, tmp_path):
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert sanitize.find_sanitizer() == program


def test_help_names_the_tools():
    command = [sys.executable, "-m", "tests.kernels.sanitize", "--help"]
    run = subprocess.run(command, cwd=sanitize.ROOT, capture_output=True, text=True, check=True)
    assert "memcheck, racecheck" in run.stdout
