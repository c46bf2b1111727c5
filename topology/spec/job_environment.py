"""Environment variables that a job gives its ranks: by value, or by name as secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLES_MAX = 200
"""The most variables of a job."""
VALUE_BYTES = 32 << 10
"""The longest value: all of them travel in messages to sites."""
OURS = re.compile(
    r"ISTHMUS_(?!ENCODE$).*|TORCHELASTIC_.*|PET_.*|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|NAME|WORLD_SIZE)"
)
"""Names that isthmus and torchrun set for each rank. Who encodes is the user's to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable of all ranks."""

    name: str
    value: str
