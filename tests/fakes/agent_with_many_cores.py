"""The agent, which says that it may use sixteen cores."""

import sys
from pathlib import Path

import isthmus.protos.usable_cores


def sixteen(cgroups: Path = Path(), own: Path = Path()) -> int:
    """Return the number, whatever the machine has."""
    return 16


if __name__ == "__main__":
    isthmus.protos.usable_cores.usable_cores = sixteen
    from isthmus.sites.agent.__main__ import main

    sys.exit(main())
