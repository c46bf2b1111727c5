"""The time of a site for its last checkpoint after SIGTERM.

The sender of the signal, such as a launcher, waits LEAVE_S longer before SIGKILL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from isthmus.protos.errors import IsthmusError

SAVE_WITHIN: Final = "ISTHMUS_SAVE_WITHIN"
"""Environment variable of an agent, in seconds."""
SAVE_WITHIN_S = 20.0
"""Default: a machine that is taken away gives some 30 s."""
LEAVE_S = 15.0
"""Time after the checkpoint, in which an agent ends its processes, ships logs and leaves (some 10
s)."""


class SaveTimeError(IsthmusError):
    """ISTHMUS_SAVE_WITHIN is not a number of seconds."""

    code = "INVALID_CONFIG"


def save_within_s(environment: Mapping[str, str], default_s: float = SAVE_WITHIN_S) -> float:
    """Return the time limit for the last checkpoint after SIGTERM.

    Raises:
        SaveTimeError: ISTHMUS_SAVE_WITHIN is set, and not a number of seconds.
    """
    given = environment.get(SAVE_WITHIN, "")
    if not given:
        return default_s
    try:
        within_s = float(given)
    except ValueError:
        within_s = math.nan
    if not 0 <= within_s < math.inf:
        raise SaveTimeError(f"{SAVE_WITHIN}: want seconds, as 20, got {given!r}")
    return within_s
