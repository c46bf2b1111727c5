"""Checks for packages that only a site's machines need: `pip install 'isthmus[train]'`.

Only package metadata is read, because importing torch takes a second or more.
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
    "safetensors": "0.4",
    "torch": "2.9",
    "zstandard": "0.22",
}
"""Oldest version by package, as in pyproject.toml."""


class CannotTrainError(IsthmusError):
    """This machine lacks packages that ranks and gateways need."""

    code = "CANNOT_TRAIN"


def require_training_part() -> None:
    """Check that this Python has what ranks and gateways need. Takes milliseconds.

    Raises:
        CannotTrainError: a package is missing. The message has the remedy.
    """
    if lack := what_lacks():
        raise CannotTrainError(f"this machine cannot train, for {lack}: {CURE}")


def what_lacks() -> str | None:
    """Return the packages missing for ranks and gateways, as a phrase; None: none.

    An unknown version is accepted: torch built from source may have none.
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
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0a1+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()
