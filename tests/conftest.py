"""Shared set-up: the Triton interpreter where there is no GPU, fixed seeds, and the backends to test."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before the first import of a kernel module.
    os.environ["TRITON_INTERPRET"] = "1"

from lightning_actprune.codec import pack_cache
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.compiled import decision_log

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from tests.support.interpreter import make_faster

    make_faster()

# Two workers share two cores, and a pool of threads does not survive the fork of tests with several processes: the
# children would wait for threads that they do not have.
torch.set_num_threads(1)

# Torch writes down all that it compiles while this logger has a handler, and pytest gives one to each that does not
# propagate.
logging.getLogger("torch.__trace").propagate = True

if not torch.cuda.is_available():
    # A seed waits for each kind of device that is not there, with a stack trace, which takes as long as many a test.
    torch.manual_seed = torch.default_generator.manual_seed

    # The thread of backward for each GPU does not survive a fork either, and the first backward starts it. One while
    # compiling would start it for the GPU that fake tensors pretend to have, and forks could not go backward then.
    torch.zeros((), requires_grad=True).backward()


def pytest_collection_finish() -> None:
    leave_alone()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        leave_alone()


def leave_alone() -> None:
    """Let the garbage collector look at what tests make, and leave alone what imports and compilers made before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Seed, restore Lightning's log level, which the examples change, and see that no pass of a compiler is left."""
    torch.manual_seed(0)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)
    if decision_log._open_logs:  # by a callback that nobody told of the end of its fit, which is in a cycle
        gc.collect()
    assert decision_log._open_logs == ()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one CPU process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After a test nothing is known of its inputs any more; others may have left some that are never freed."""
    before = set(pack_cache._entries)
    yield
    if set(pack_cache._entries) > before:  # collecting takes longer than most tests
        gc.collect()
    assert set(pack_cache._entries) <= before


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The CPU with plain torch, or the GPU with the kernels, and with convolutions in fp32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with force_backend("reference" if request.param == "cpu" else "triton"):
        yield torch.device(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """The device on which kernels are called directly: the CPU through the interpreter, or the GPU."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU")
    return torch.device(request.param)
