"""Environment variables of a job's ranks: given by value, or passed by name as secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.units import format_size
from isthmus.topology.spec.yaml_keys import Checked

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLES_MAX = 200
"""Limit on the variables of a job."""
VALUE_BYTES = 32 << 10
"""Longest value: variables travel in messages to sites."""
OURS = re.compile(
    r"ISTHMUS_(?!ENCODE$).*|TORCHELASTIC_.*|PET_.*|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|NAME|WORLD_SIZE)"
)
"""Names that isthmus and torchrun set for each rank, and a job may not; except the choice of who
encodes."""


LEFT_OVER = re.compile(
    r"TORCHELASTIC_.*|PET_.*|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|NODE_RANK"
    r"|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|NAME|WORLD_SIZE)|SLURM_.*|PMIX?_.*|OMPI_.*"
)
"""Names by which a launcher tells its processes their ranks: what started an agent tells it nothing
about the ranks that it starts."""


def _variable_name(value: str) -> str:
    if NAME.fullmatch(value) is None:
        raise ValueError(f"want letters, digits and '_', no digit first; got {shown(value)}")
    if OURS.fullmatch(value) is not None:
        raise ValueError(f"{value} is set by isthmus or torchrun for each rank: leave it out")
    return value


def _variable_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("a variable cannot hold a NUL byte")
    if len(value.encode()) > VALUE_BYTES:
        raise ValueError(f"want at most {format_size(VALUE_BYTES)}")
    return value


VariableName = Annotated[
    str, Checked(_variable_name, {"type": "string", "pattern": rf"^{NAME.pattern}$"})
]
VariableValue = Annotated[str, Checked(_variable_value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable of all ranks."""

    name: str
    value: str
