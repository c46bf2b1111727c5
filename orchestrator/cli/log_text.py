"""What processes print, for terminals: a line's last state, and of its codes only colours."""

from __future__ import annotations

import re

from isthmus.orchestrator.evidence.view.formats import visible

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CODE = re.compile(
    r"""\x1b\[ [0-?]* [ -/]* [@-~]?             # CSI: moves, erases, colours; or cut off
      | \x1b[]PX^_] [^\x07\x1b]* (?:\x07|\x1b\\)?   # titles, links and other strings
      | \x1b [ -/]* [0-~]?                       # all others
    """,
    re.VERBOSE,
)
_RESET = "\x1b[0m"


def shown(text: str, *, has_colour: bool) -> str:
    """Return a line as it would stand on a terminal.

    A progress bar that has overwritten itself is its last state. Colours stay where they are
    wanted; a sign is in place of what else would steer the terminal.
    """
    last = ""
    for state in reversed(text.split("\r")):
        if _CODE.sub("", state).strip():
            last = state
            break
    colours = _COLOUR.findall(last) if has_colour else []
    parts = _COLOUR.split(last) if has_colour else [last]
    plain = [visible(_CODE.sub("", part)) for part in parts]
    if not colours:
        return plain[0]
    return "".join(part + colour for part, colour in zip(plain, [*colours, _RESET], strict=True))
