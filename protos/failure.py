"""What ended or broke in a run: one record, which ranks, gateways, agents and coordinator pass on.

A launcher says it to its agent, a gateway writes it to its agent and its ranks, an agent
sends it to the coordinator, and the coordinator keeps it in the journal. Each fills in what only it
knows. Nothing heavy is imported here, for a rank reads this module before anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.protos.control.v1 import control_pb2

MESSAGE_CHARS = 500
"""A longer message is cut: it becomes one line of a report."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "float": (int, float),
}
"""What JSON may hold for a field of that type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that ended or broke."""

    code: str
    """A key of protos/catalogue.py."""
    message: str
    """One line."""
    at_s: float = 0.0
    """When it happened, on the monotonic clock of the machine that holds this object."""
    site: str = ""
    """Where; empty: at the site of whoever reports it, or at no site in particular."""
    node: int = -1
    """Inside the site; -1: at none in particular."""
    gateway: int = -1
    """Inside the site; -1: none."""
    rank: int = -1
    """Inside the site; -1: at none in particular."""
    exit_code: int = 0
    """The exit code of the process that ended; negative: the signal's number."""
    log_path: str = ""
    reported_by: str = ""
    """The site that told the coordinator, which may blame another; empty: the coordinator."""
    is_collateral: bool = False
    """It followed from something else, by the judgement of whoever reported it."""

    @property
    def place(self) -> str:
        """Where it happened, for people: `site b, rank 3`; empty for the run as a whole."""
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
        """The message in one line, with its place unless it names the site itself."""
        names_site = not self.site or f"site {self.site}" in self.message
        return self.message if names_site else f"{self.place}: {self.message}"

    def to_message(self, now_s: float | None = None) -> control_pb2.Failure:
        """Return the control plane's message.

        Args:
            now_s: On the clock of `at_s`. The message says how long ago it happened, since clocks
                of two machines have nothing in common. None: it does not say.
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
        """Return what a message says, dated by the receiver's clock `now_s`."""
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

    def to_json(self) -> dict[str, Any]:
        """Return all but `at_s`, which means nothing to another machine."""
        fields = dataclasses.asdict(self)
        del fields["at_s"]
        fields["collateral"] = fields.pop("is_collateral")
        return fields

    def to_line(self) -> dict[str, Any]:
        """Return what a gateway says to its agent and to its ranks."""
        return {"op": "failed", **self.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Failure:
        """Return the failure that `to_json` or `to_line` wrote, with `at_s` if somebody added it.

        Fields that this build does not know are left out, for the writer may be newer.

        Raises:
            TypeError: a field is of another type.
            KeyError: there is no code, or no message.
        """
        given: dict[str, Any] = {"code": fields["code"], "message": fields["message"]}
        for field in dataclasses.fields(cls):
            key = "collateral" if field.name == "is_collateral" else field.name
            if key not in fields:
                continue
            value = given[field.name] = fields[key]
            is_of_type = isinstance(value, _TYPES[str(field.type)])
            if not is_of_type or (field.type == "int" and not -(2**31) <= value < 2**31):
                raise TypeError(f"{key}: want {field.type}, got {value!r:.100}")
        return cls(**given)


def name_exit(exit_code: int) -> str:
    """Return what a process ended with, in words: `status 1`, `SIGKILL`."""
    if exit_code >= 0:
        return f"status {exit_code}"
    try:
        return Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def one_line(text: str) -> str:
    """Return `text` on one line, cut where it gets too long."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"


def reason_of(error: BaseException) -> str:
    """Return an exception's type and text, on one line.

    Where the text is no sentence, as a KeyError's, which is its key, the place in the code follows.
    """
    text, kind = one_line(str(error)), type(error).__name__
    said = f"{kind}: {text}" if text else kind
    if " " in text:
        return one_line(said)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return said
    code = at.tb_frame.f_code
    file = "/".join(code.co_filename.split("/")[-2:])
    return f"{said}, in {code.co_name}, {file}:{at.tb_lineno}"
