"""Tells once the traceback that many ranks print: the first, and at the end who else had it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from isthmus.orchestrator.evidence.view.alike import is_alike
from isthmus.protos.control.v1 import control_pb2

BEGIN = "Traceback (most recent call last):"
_BETWEEN = (
    "",
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
"""What stands between the tracebacks of a chain."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
MAX_LINES = 1000
"""Lines of one traceback; what is longer is none."""
MAX_KINDS = 100
"""Different tracebacks that are remembered."""
NAMED = 4
"""Others that are named."""


@dataclass(slots=True)
class _Told:
    """A traceback that was shown."""

    text: str
    last: control_pb2.LogLine
    others: dict[str, None] = field(default_factory=dict)
    """Who else had it."""


@dataclass(slots=True)
class _Source:
    block: list[control_pb2.LogLine] = field(default_factory=list)
    """The lines of a traceback that has begun."""
    has_left_out: bool = False
    """The last traceback was one that had been told."""


def told_once(lines: Iterable[control_pb2.LogLine]) -> Iterator[control_pb2.LogLine]:
    """Yield lines; of tracebacks that differ in numbers only, the first and who else had it.

    The lines of a traceback come together.
    """
    sources: dict[tuple[str, str], _Source] = {}
    told: list[_Told] = []
    for line in lines:
        source = sources.setdefault((line.site, line.source), _Source())
        text = line.text.rstrip()
        if source.block:
            source.block.append(line)
            if _goes_on(text) and len(source.block) < MAX_LINES:
                continue
            block, source.block = source.block, []
            source.has_left_out = _is_told(block, told)
            if not source.has_left_out:
                yield from block
        elif text == BEGIN:
            source.block = [line]
        elif not (source.has_left_out and text in _BETWEEN):
            source.has_left_out = False
            yield line
    for source in sources.values():
        yield from source.block
    for each in told:
        if each.others:
            yield _summary(each)


def _goes_on(text: str) -> bool:
    """Whether a traceback has not come to its exception: its frames are indented."""
    return text.startswith((" ", "\t")) or not text


def _is_told(block: list[control_pb2.LogLine], told: list[_Told]) -> bool:
    """Whether a traceback was shown before, of another source; else it is now."""
    text = _ADDRESS.sub("0", "\n".join(each.text for each in block))
    who, last = _name(block[0]), block[-1]
    for each in told:
        if is_alike(each.text, text, (each.last.site, last.site)):
            if who != _name(each.last):
                each.others[who] = None
                return True
            return False
    if len(told) < MAX_KINDS:
        told.append(_Told(text, last))
    return False


def _summary(told: _Told) -> control_pb2.LogLine:
    line = control_pb2.LogLine()
    line.CopyFrom(told.last)
    names = list(told.others)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    plural = "s" if len(names) > 1 else ""
    line.text += f" (and {len(names)} other{plural}: {', '.join(names[:NAMED])}{more})"
    return line


def _name(line: control_pb2.LogLine) -> str:
    return f"{line.site}/{line.source}" if line.site else line.source
