"""The record of a failure in a run, passed on by ranks, gateways, agents and coordinator.

A launcher reports it to its agent, a gateway to its agent and ranks, an agent to the coordinator,
which keeps it in the journal. A process that passes it on fills in fields that only it knows. This
module has no heavy imports, because a rank imports it first.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from isthmus.protos.control.v1 import control_pb2

MESSAGE_CHARS = 500
"""Longest message; longer ones are cut to make one line of a report."""

FILE_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENAMETOOLONG,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
        errno.ETXTBSY,
    }
)
"""The file system's answers that an operator can mend; any other OSError is our bug."""

_FRAMES = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)+", re.MULTILINE)
Int32 = Annotated[int, (-(1 << 31), (1 << 31) - 1)]
"""What fits the control plane's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure: a process that ended, or an error, with its place, time and cause."""

    code: str
    """A key of protos/catalogue.py."""
    message: str
    """One line."""
    at_s: float = 0.0
    """Time of the failure, on the monotonic clock of the machine that holds this object."""
    site: str = ""
    """Site of the failure; empty: the reporter's site, or no site in particular."""
    node: Int32 = -1
    """Number inside the site; -1: none in particular."""
    gateway: Int32 = -1
    """Number inside the site; -1: none."""
    rank: Int32 = -1
    """Number inside the site; -1: none in particular."""
    exit_code: Int32 = 0
    """Exit code of the process that ended; negative: the signal's number."""
    log_path: str = ""
    reported_by: str = ""
    """Site that reported the failure, possibly blaming another; empty: the coordinator."""
    is_collateral: bool = False
    """Whether the failure is a consequence of another, in the reporter's judgement."""

    @property
    def place(self) -> str:
        """The failure's place, for people: `site b, rank 3`; empty for the run as a whole."""
        parts = [f"site {self.site}"] if self.site else []
        if self.rank >= 0:
            parts.append(f"rank {self.rank}")
        elif self.node >= 0:
            parts.append(f"node {self.node}")
            if self.gateway >= 0:
                parts.append(f"gateway {self.gateway}")
        return ", ".join(parts)

    @property
    def reason(self) -> str:
        """The message in one line, with the place unless the message names the site."""
        names_site = not self.site or f"site {self.site}" in self.message
        return self.message if names_site else f"{self.place}: {self.message}"

    def to_message(self, now_s: float | None = None) -> control_pb2.Failure:
        """Return the control plane's message.

        Args:
            now_s: Current time on the clock of `at_s`. The message holds the failure's age, because
                two machines' clocks differ. None: no age.
        """
        from isthmus.protos.control.v1 import control_pb2

        return control_pb2.Failure(
            code=self.code,
            message=self.message,
            site=self.site,
            node=self.node,
            gateway=None if self.gateway < 0 else self.gateway,
            rank=self.rank,
            exit_code=self.exit_code,
            log_path=self.log_path,
            age_s=0.0 if now_s is None else max(0.0, now_s - self.at_s),
            collateral=self.is_collateral,
        )

    @classmethod
    def from_message(cls, message: control_pb2.Failure, now_s: float) -> Failure:
        """Return the failure in a message, dated by the receiver's clock `now_s`."""
        return cls(
            code=message.code,
            message=message.message,
            at_s=now_s - max(0.0, message.age_s),
            site=message.site,
            node=message.node,
            gateway=message.gateway if message.HasField("gateway") else -1,
            rank=message.rank,
            exit_code=message.exit_code,
            log_path=message.log_path,
            is_collateral=message.collateral,
        )


def name_exit(exit_code: int) -> str:
    """Return a process's end in words: `status 1`, `SIGKILL`."""
    if exit_code >= 0:
        return f"status {exit_code}"
    try:
        return Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def one_line(text: str) -> str:
    """Return `text` on one line, without the frames of a traceback in it, cut at MESSAGE_CHARS.

    Such a one has an error that passes on another process's: what that one said is at its end.
    """
    line = " ".join(_FRAMES.sub("", text).split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"


def text_of(error: BaseException) -> str:
    """Return an exception's text; if it is no sentence, with its type and its place in the code.

    Such are a KeyError's key, and the text of an exception that was raised without one.
    """
    text = str(error)
    return text if _is_sentence(error, text) else reason_of(error)


def _is_sentence(error: BaseException, text: str) -> bool:
    # A KeyError's text is its key's repr, whatever is in it.
    return len(text.split()) > 1 and not isinstance(error, KeyError)


def reason_of(error: BaseException) -> str:
    """Return an exception's type and text, on one line.

    If the text is no sentence, such as a KeyError's key, the place in the code follows.
    """
    text, kind = one_line(str(error)), type(error).__name__
    said = f"{kind}: {text}" if text else kind
    if _is_sentence(error, text):
        return one_line(said)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return said
    code = at.tb_frame.f_code
    file = "/".join(code.co_filename.split("/")[-2:])
    return f"{said}, in {code.co_name}, {file}:{at.tb_lineno}"
