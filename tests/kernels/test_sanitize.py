"""The program that the sanitizers watch, unwatched, and how their reports are read."""

from __future__ import annotations

import sys

import pytest

from tests.kernels import sanitize
from tests.support.workload import kernel_names, run_all


@pytest.mark.nightly
def test_workload_launches_every_kernel_with_right_results(kernel_device):
    assert set(run_all(kernel_device)) == kernel_names() >= {"unpack_kernel", "weight_grad_kernel"}


FAKE = """#!{python}
import sys
if "--help" not in sys.argv:
    print("ran under the watch: {ran}")
    print("{summary}")
    sys.exit({code})
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("summary", "ran", "code", "expected"),
    [
        ("ERROR SUMMARY: 0 errors", "unpack_kernel", 0, sanitize.CLEAN),
        ("ERROR SUMMARY: 12 errors", "unpack_kernel", 0, sanitize.FOUND),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "unpack_kernel", 0, sanitize.CLEAN),
        ("RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", "unpack_kernel", 0, sanitize.FOUND),
        ("Error: Device not supported", "", 0, sanitize.BROKEN),
        ("ERROR SUMMARY: 0 errors", "unpack_kernel", 1, sanitize.BROKEN),
    ],
)
def test_outcome_of_a_tool_is_its_exit_code(tmp_path, capfd, summary, ran, code, expected):
    program = tmp_path / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable, summary=f"========= {summary}", ran=ran, code=code))
    program.chmod(0o755)
    child = [sys.executable, "-m", "tests.kernels.sanitize", "--run"]
    assert sanitize.watched(program, "memcheck", child) == expected
    assert capfd.readouterr().out.splitlines()[-1].startswith("memcheck: ")


def test_without_the_program_the_script_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "candidates", lambda: iter(()))
    assert sanitize.check(["memcheck"]) == sanitize.MISSING
    assert "not found" in capsys.readouterr().out
