"""Which exceptions are a script's own, and which a machine's or a network's."""

import errno
import subprocess

import pytest
import torch
import torch.distributed as dist

from isthmus.sites.node.outages import is_node_fault, is_outage, is_signal_status


def caused(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__context__ = inner
    return outer


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError(),
        KeyboardInterrupt(),
        dist.DistBackendError("NCCL error in: x.cpp:77, unhandled system error"),
        dist.DistNetworkError("The client socket has timed out"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might"),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        RuntimeError("CUDA error: no CUDA-capable device is detected"),
        RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Timed out waiting for recv"),
        RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed."),
        caused(ValueError("cannot save"), OSError(errno.EROFS, "Read-only file system")),
    ],
    ids=repr,
)
def test_what_a_machine_or_a_network_does_is_an_outage(error: BaseException) -> None:
    assert is_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("attach() got an unexpected keyword"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "data.bin"),
        PermissionError(errno.EACCES, "Permission denied"),
        ModuleNotFoundError("No module named 'x'"),
        AssertionError(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("size mismatch: unknown error of my own"),
        dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1"),
        subprocess.CalledProcessError(1, "make"),
        RuntimeError("DataLoader worker (pid(s) 71) exited unexpectedly"),
        caused(TypeError("of a bug"), FileNotFoundError(errno.ENOENT, "no cache")),
    ],
    ids=repr,
)
def test_what_a_script_does_again_wherever_it_runs_is_its_own(error: BaseException) -> None:
    assert not is_outage(error)


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (caused(ValueError("cannot save"), OSError(errno.EROFS, "Read-only file system")), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors"), True),
        (RuntimeError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."), True),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (dist.DistBackendError("NCCL error in: x.cpp:77, unhandled system error"), False),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), False),
    ],
    ids=repr,
)
def test_what_a_new_start_on_the_same_machine_does_not_mend(
    error: BaseException, *, is_fault: bool
) -> None:
    assert is_node_fault(error) is is_fault


def test_what_was_handled_is_no_cause_where_the_script_says_so() -> None:
    error = caused(ValueError("a bug"), OSError(errno.EIO, "Input/output error"))
    error.__suppress_context__ = True  # as `raise … from None` does
    assert not is_outage(error)


@pytest.mark.parametrize(
    ("status", "is_signals"),
    [(130, True), (143, True), (137, True), (1, False), (128, False), (75, False), (255, False)],
)
def test_a_status_by_which_shells_tell_of_a_signal(status: int, is_signals: bool) -> None:
    assert is_signal_status(status) is is_signals
