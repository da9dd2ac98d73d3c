"""A launch must pass to the native function exactly what Triton's own launcher passes, whatever its version."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher

from lightning_actprune.kernels.launch import runner

GRID, STREAM, SCALARS = (3, 2, 1), 12345, (7, False, 64)
FIXED = ("function", (1, 2), None, None, None)


class Flat:
    """Passes the kernel's arguments one by one."""

    global_scratch_size = 0

    def __init__(self):
        self.launch = mock.Mock()

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, True, False, None, *rest)


class Packed(Flat):
    """Passes them in one tuple, behind other things."""

    def __call__(self, x, y, z, stream, function, metadata, enter, leave, more, *rest):
        self.launch(x, y, z, stream, function, True, metadata, enter, leave, more, {"signature": 1}, rest)


class Scratch(Flat):
    """Allocates memory for each launch."""

    global_scratch_size = 128

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, object(), *rest)


class Twice(Flat):
    """Calls the native function more than once."""

    def __call__(self, *arguments):
        self.launch(*arguments)
        self.launch(*arguments)


class Wrapped(Flat):
    """Passes the arguments on in another form."""

    def __call__(self, x, y, z, stream, *rest):
        self.launch(x, y, z, stream, [*rest])


def triton_launcher():
    """Return Triton's own launcher of a kernel that needs no memory of its own, with a native function to watch."""
    launcher = object.__new__(CudaLauncher)
    launcher.__dict__.update(
        launch=mock.Mock(), num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=True, launch_pdl=False, gsan_enabled=False,
        arg_annotations="annotations", kernel_signature=b"signature",
    )  # fmt: skip
    return launcher


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """Triton's launcher asks for the driver, which needs a GPU, and has nothing to ask it."""
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace()))


@pytest.mark.parametrize("make", [Flat, Packed, triton_launcher])
def test_native_function_gets_what_the_launcher_would_pass(make):
    launcher, tensors = make(), (torch.ones(3), torch.ones(5))
    run = runner(launcher, GRID, lambda: STREAM, FIXED, SCALARS)
    assert not launcher.launch.called
    launcher(*GRID, STREAM, *FIXED, *[t.data_ptr() for t in tensors], *SCALARS)
    with mock.patch.object(type(launcher), "__call__", side_effect=AssertionError("the launcher itself was called")):
        run(tensors)
    expected, actual = launcher.launch.call_args_list
    assert actual == expected


@pytest.mark.parametrize("make", [Scratch, Twice, Wrapped])
def test_launchers_that_do_more_are_called(make):
    launcher, tensors = make(), (torch.ones(3), torch.ones(5))
    run = runner(launcher, GRID, lambda: STREAM, FIXED, SCALARS)
    with mock.patch.object(type(launcher), "__call__") as call:
        run(tensors)
    call.assert_called_once_with(*GRID, STREAM, *FIXED, *[t.data_ptr() for t in tensors], *SCALARS)


def test_stream_is_asked_for_at_each_launch():
    launcher, streams = Flat(), iter([1, 2])
    run = runner(launcher, GRID, lambda: next(streams), FIXED, SCALARS)
    run(())
    run(())
    assert [call.args[3] for call in launcher.launch.call_args_list] == [1, 2]


def test_launcher_of_any_other_kind_is_called():
    launcher = mock.Mock(spec=[])
    runner(launcher, GRID, lambda: STREAM, FIXED, SCALARS)((torch.ones(2),))
    assert launcher.call_args.args[:4] == (*GRID, STREAM)
