"""How long a site has for a last checkpoint when it is told to end.

Who tells it, a launcher say, allows LEAVE_S more than that until it kills.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from isthmus.protos.errors import IsthmusError

SAVE_WITHIN: Final = "ISTHMUS_SAVE_WITHIN"
"""The environment variable of an agent: seconds."""
SAVE_WITHIN_S = 20.0
"""Where nothing is said: a machine that is taken away gives some 30 s."""
LEAVE_S = 15.0
"""Afterwards an agent ends its processes, ships their logs and takes its leave, in some 10 s."""


class SaveTimeError(IsthmusError):
    """ISTHMUS_SAVE_WITHIN is not a number of seconds."""

    code = "INVALID_CONFIG"


def save_within_s(environment: Mapping[str, str], default_s: float = SAVE_WITHIN_S) -> float:
    """Return within how many seconds after SIGTERM the last checkpoint has to be written.

    Raises:
        SaveTimeError: ISTHMUS_SAVE_WITHIN is there, and is not a number of seconds.
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
