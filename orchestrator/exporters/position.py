"""How far a run was exported, which later exporters of the run go on from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.orchestrator.run_folder.home import read_object
from isthmus.orchestrator.run_folder.run_files import write_atomically

POSITION = "exporters.json"
"""Written by a run's exporters, as a `Position`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """All before it was exported."""

    line: int = 0
    """Number of the next line of metrics.jsonl, counted over all of its parts."""
    sequence: int = 0
    """Sequence number of the last event of the journal."""

    @classmethod
    def read(cls, folder: Path) -> Position:
        """Return where earlier exporters of the run have ended: at first, the beginning."""
        written = read_object(folder / POSITION)
        line, sequence = written.get("line"), written.get("sequence")
        if type(line) is not int or type(sequence) is not int:
            return cls()
        return cls(line=line, sequence=sequence)

    def write(self, folder: Path) -> None:
        """Keep it for later exporters of the run.

        Raises:
            OSError: the disk refuses.
        """
        write_atomically(folder / POSITION, json.dumps(asdict(self)) + "\n")
