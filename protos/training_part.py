"""What only a site's machines need, to run gateways and ranks: `pip install 'isthmus[train]'`.

Nothing here is imported, for torch takes a second and more: it is asked what is installed.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

from isthmus.protos.errors import IsthmusError

CURE = "pip install 'isthmus[train]'"
NEEDED = {
    "google-crc32c": "1.5",
    "hpack": "4.2",
    "llvmlite": "0.45",
    "numba": "0.62",
    "safetensors": "0.4",
    "torch": "2.9",
    "zstandard": "0.22",
}
"""Packages and the oldest version of each, as pyproject.toml has them, too."""


class CannotTrainError(IsthmusError):
    """This machine lacks packages that ranks and gateways need."""

    code = "CANNOT_TRAIN"


def require_training_part() -> None:
    """Check that this Python has what ranks and gateways need. Takes milliseconds.

    Raises:
        CannotTrainError: it does not. The message has the cure.
    """
    if lack := what_lacks():
        raise CannotTrainError(f"this machine cannot train, for {lack}: {CURE}")


def what_lacks() -> str | None:
    """Return what this Python lacks for ranks and gateways, as the rest of a sentence.

    What cannot be told is good: a build of torch from its sources may have no version.
    """
    missing, old = [], []
    for package, oldest in NEEDED.items():
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            missing.append(package)
            continue
        version = _version(package)
        if version and () < _numbers(version) < _numbers(oldest):
            old.append(f"{package} is {version}, older than {oldest}")
    absent = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    return ", and ".join(([absent] if missing else []) + old) or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 13, 0) of 2.13.0a1+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()
