"""Decides whether an exception that ended a rank is the script's fault, or an outage, and of what.

A script's own error recurs wherever it is started, so it ends the run. An outage (a broken device,
a full disk, a reset connection) concerns one site, and may be over when that site is started again.
This module does not import torch: its errors are recognised by name.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

_OF_DISKS = frozenset(
    {
        *(errno.EDQUOT, errno.EIO, errno.ENODEV, errno.ENOSPC, errno.ENXIO, errno.EREMOTEIO),
        errno.EROFS,
    }
)
"""Errors of disks and devices, which a new start on the same machine does not mend."""
_OF_MACHINE = frozenset(
    {
        *(*_OF_DISKS, errno.ESTALE, errno.ENOMEM, errno.ENFILE, errno.EHOSTDOWN),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH),
        *(errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EPIPE, errno.ETIMEDOUT),
    }
)
"""Errors of disks, devices and networks. A missing file is not among them."""
_TYPES_OF_NETWORK = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
"""Errors of torch.distributed when ranks of a site lose each other."""
_MISUSE = re.compile(r"ncclInvalid(Usage|Argument)|Duplicate GPU detected")
_TEXTS_OF_MACHINE = re.compile(
    r"""
      CUDA\ error:\ (uncorrectable | hardware | unknown\ error | no\ CUDA-capable | CUDA-capable
                     | system\ not\ yet | Invalid\ access\ of\ peer\ GPU)
    | Error\ 802:                          # of cudaGetDeviceCount: the fabric is not up
    | GPU\ is\ lost | fallen\ off\ the\ bus # of the driver
    | nccl(System|Remote|Internal)Error | unhandled\ system\ error
    | gloo/transport                       # a connection of gloo's
    | DataLoader\ worker\ .*\ is\ killed\ by\ signal
    """,
    re.VERBOSE,
)
_TEXTS_OF_DEVICES = re.compile(
    r"CUDA error: (uncorrectable|hardware|no CUDA-capable)|GPU is lost|fallen off the bus|\bXid\b"
)
"""A device, or its memory, is broken."""
_STATUSES_OF_SIGNALS = frozenset(128 + each for each in (SIGHUP, SIGINT, SIGKILL, SIGTERM))
"""Exit statuses of scripts that caught a signal, by shell convention."""


def is_outage(error: BaseException) -> bool:
    """Whether an exception, or one of its causes, is due to the machine or a network.

    Running out of memory, on a device or the host, counts as the script's fault.
    """
    return any(_is_of_machine(each) for each in causes(error))


def is_node_fault(error: BaseException) -> bool:
    """Whether a disk or a device of this machine is at fault: an outage that is likely to last."""
    return any(
        each.errno in _OF_DISKS
        if isinstance(each, OSError)
        else isinstance(each, RuntimeError) and bool(_TEXTS_OF_DEVICES.search(str(each)))
        for each in causes(error)
    )


def is_signal_status(exit_code: int) -> bool:
    """Whether an exit status means that the script ended after catching a signal."""
    return exit_code in _STATUSES_OF_SIGNALS


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its causes and contexts."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _is_of_machine(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):  # SIGINT
        return True
    if isinstance(error, OSError):
        return error.errno in _OF_MACHINE or isinstance(error, ConnectionError | TimeoutError)
    text = str(error)
    if _MISUSE.search(text):
        return False
    names = {each.__name__ for each in type(error).__mro__}
    if names & _TYPES_OF_NETWORK:
        return True
    return isinstance(error, RuntimeError) and bool(_TEXTS_OF_MACHINE.search(text))
