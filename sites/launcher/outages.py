"""Whose fault an exception is that ended a rank: the script's, or its machine's and network's.

A script that raises does so again wherever it is started, so its error is the run's. What a machine
does to a script (a device that breaks, a full disk, a connection that is reset) befalls one site,
and may be over when that site is started again. No torch: errors of its are known by their names.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

_OF_MACHINE = frozenset(
    {
        *(errno.EDQUOT, errno.EIO, errno.ENODEV, errno.ENOSPC, errno.ENXIO, errno.EROFS),
        *(errno.ESTALE, errno.ENOMEM, errno.ENFILE, errno.EREMOTEIO, errno.EHOSTDOWN),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH),
        *(errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EPIPE, errno.ETIMEDOUT),
    }
)
"""Errors of disks, devices and networks. A file that is not there is not among them."""
_TYPES_OF_NETWORK = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
"""What torch.distributed raises when ranks of a site do not reach each other any more."""
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
_STATUSES_OF_SIGNALS = frozenset(128 + each for each in (SIGHUP, SIGINT, SIGKILL, SIGTERM))
"""What a script ends with that has caught a signal, by a shell's custom."""


def is_outage(error: BaseException) -> bool:
    """Whether the machine or a network is behind an exception: itself, or what it came from.

    Memory that is too small for the script's batch, of a device or of the host, is the script's.
    """
    return any(_is_of_machine(each) for each in causes(error))


def is_signal_status(exit_code: int) -> bool:
    """Whether a script ended with this status because a signal had it end."""
    return exit_code in _STATUSES_OF_SIGNALS


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, or while that was handled."""
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
