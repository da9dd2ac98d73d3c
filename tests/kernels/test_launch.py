"""A launch must pass to the native function exactly what Triton's own launcher passes, whatever its version."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher

from lightning_actprune.codec import dispatch
from lightning_actprune.kernels import launch
from lightning_actprune.kernels.launch import Launch, runner

GRID, STREAM, SCALARS = (3, 2, 1), 12345, (7, False, 64)
FIXED = ("function", (1, 2), None, None, None)


class Flat:
    """Passes the kernel's arguments one by one."""

    global_scratch_size = 0

    def __init__(self):
        self.launch = mock.Mock()

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(gridX, gridY, gridZ, stream, function, True, False, None, *args)


class Packed(Flat):
    """Passes them in one tuple, behind other things."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        more = kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook
        self.launch(gridX, gridY, gridZ, stream, function, True, *more, {"signature": 1}, args)


def other(call, scratch=0):
    """Return a class of launchers that do something else."""
    return type("Other", (Flat,), {"__call__": call, "global_scratch_size": scratch})


def one_more(self, gridX, gridY, gridZ, stream, cluster, function, *args):
    """Pass on an argument in front of the kernel's as if it were one of these."""
    self.launch(gridX, gridY, gridZ, stream, cluster, function, *args)


def wrapped(self, gridX, gridY, gridZ, stream, function, *args):
    self.launch(gridX, gridY, gridZ, stream, [*args])


Wrapped = other(wrapped)
OTHERS = [other(Flat.__call__, scratch=128), Wrapped, other(one_more), lambda: mock.Mock(spec=[])]


def triton_launcher():
    """Return Triton's own launcher of a kernel that needs no memory of its own, with a native function to watch."""
    launcher = object.__new__(CudaLauncher)
    launcher.__dict__.update(
        launch=mock.Mock(), num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=True, launch_pdl=False, gsan_enabled=False,
        arg_annotations="annotations", kernel_signature=b"signature",
    )  # fmt: skip
    return launcher


def compiled(launcher):
    return SimpleNamespace(run=launcher, function=FIXED[0], packed_metadata=FIXED[1])


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return active


@pytest.mark.parametrize("make", [Flat, Packed, triton_launcher])
def test_native_function_gets_what_the_launcher_would_pass(make, driver):
    launcher, tensors = make(), (torch.ones(3), torch.ones(5))
    streams = iter([STREAM, 2])
    driver.get_current_stream = lambda device: next(streams)  # asked for at each launch
    run, addresses = runner(compiled(launcher), 0, GRID, SCALARS), [t.data_ptr() for t in tensors]
    assert not launcher.launch.called
    launcher(*GRID, STREAM, *FIXED, *addresses, *SCALARS)
    with mock.patch.object(type(launcher), "__call__", side_effect=AssertionError("the launcher itself was called")):
        run(addresses)
        run(addresses)
    expected, actual, last = launcher.launch.call_args_list
    assert actual == expected
    assert (actual.args[3], last.args[3]) == (STREAM, 2)


def test_what_is_not_known_is_left_to_triton(driver):
    """Launchers that do more, and names that are gone."""
    for make in OTHERS:
        assert runner(compiled(make()), 0, GRID, SCALARS) is None
    for missing in ("run", "function", "packed_metadata", "get_current_stream"):
        kernel = compiled(Flat())
        delattr(driver if missing == "get_current_stream" else kernel, missing)
        assert runner(kernel, 0, GRID, SCALARS) is None


@pytest.mark.parametrize(("make", "by_triton"), [(Flat, 1), (Wrapped, 3)])
def test_triton_launches_the_first_time_or_always(make, by_triton, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "LONG_COMPILATION", 0)
    launcher, calls, compilations, x = make(), [], [], torch.ones(3)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: calls.append((grid, arguments, options)) or compiled(launcher)

    for own in (Launch(Kernel(), (3,), 7, num_warps=4) for _ in range(2)):
        dispatch.compilation.listen(lambda: compilations.append(len(calls)))
        for _ in range(3):
            own(x)
    dispatch.compilation.listen(None)
    assert compilations == [1, by_triton + 1]
    assert calls == 2 * by_triton * [((3, 1, 1), (x, 7), {"num_warps": 4})]
    assert launcher.launch.call_count == 2 * (3 - by_triton)


def test_launcher_of_this_triton_is_known():
    assert tuple(map(str, inspect.signature(triton_launcher()).parameters.values())) in launch._KNOWN
