"""Remembers in a file which coordinator an agent served, so that no older one commands it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from isthmus.protos.errors import StaleGenerationError
from isthmus.protos.failure import text_of

log = logging.getLogger(__name__)


class KnownCoordinator:
    """The journal of the last coordinator, and the highest generation seen from it."""

    def __init__(self, folder: Path, site: str) -> None:
        """Read the file that an earlier agent of the site left in `folder`, if valid."""
        self.journal = ""
        self.generation = 0
        self._path = folder / f"agent-{site}.json"
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            self.journal, self.generation = str(kept["journal"]), int(kept["generation"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s: %s: the previous coordinator is not known", self._path, text_of(error))

    def meet(self, journal: str, generation: int, *, is_running: bool) -> None:
        """Check and record a coordinator that welcomes this agent.

        Raises:
            StaleGenerationError: a newer coordinator of the same journal came before, or a run is
                in progress that a coordinator with another journal does not know.
        """
        if journal == self.journal:
            if generation < self.generation:
                raise StaleGenerationError(
                    f"an older coordinator answers, of generation {generation}; "
                    f"this site has heard of {self.generation}"
                )
        elif is_running:
            raise StaleGenerationError(
                "another coordinator answers, with another --state: it does not know the run here"
            )
        if (journal, generation) != (self.journal, self.generation):
            self.journal, self.generation = journal, generation
            self._keep()

    def _keep(self) -> None:
        text = json.dumps({"journal": self.journal, "generation": self.generation})
        scratch = self._path.with_name(f".{self._path.name}")
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:  # a protection against a rare case, not worth a run
            log.warning("%s: %s", self._path, error.strerror)
