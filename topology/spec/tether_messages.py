"""What a launcher and its tether (sites/tether.py) say to each other: a line each way."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.topology.spec.json_fields import Message

GREETING = "isthmus-tether "
"""Begins the tether's line, before Versions. Login shells may have printed before."""
FOLDER = "{folder}"
"""Stands for the folder in the command and in the environment."""
CREDENTIALS = "credentials"
"""Subfolder of the files."""


class Versions(Message):
    """The tether's build and protocol versions, so that the launcher can refuse."""

    build: str
    control: tuple[int, int]
    exchange: tuple[int, int]


class Spec(Message):
    """The command of a tether."""

    folder: str
    """Working folder on the other machine; `~` is the user's home there."""
    command: tuple[str, ...]
    files: Mapping[str, bytes]
    """Secrets and documents by name, for the user only and for as long as the command lives."""
    env: Mapping[str, str]
    silence_s: float
    """Silence after which the tether ends by itself."""
