"""The program that the sanitizers watch, unwatched, and how their reports are read."""

from __future__ import annotations

import pytest

from tests.kernels.sanitize import errors_in
from tests.support.workload import kernel_names, run_all


@pytest.mark.nightly
def test_workload_launches_every_kernel(kernel_device):
    assert set(run_all(kernel_device)) == kernel_names() >= {"unpack_kernel", "weight_grad_kernel"}


def test_errors_of_a_report_are_counted():
    assert errors_in("ERROR SUMMARY: 12 errors") == 12
    assert errors_in("RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)") == 3
    assert errors_in("Error: Device not supported") is None
