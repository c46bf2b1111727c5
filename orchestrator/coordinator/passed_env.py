"""Values of variables that jobs pass on to their ranks: secrets, kept for as long as a run goes on.

A site that comes back needs them again, also from a coordinator that was started anew. So they lie
in the state folder, in files that nobody but the user may read, and in nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from pathlib import Path

from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.private_files import make_secret, private_folder, read_secret

FOLDER = "passed_env"

log = logging.getLogger(__name__)


class PassedEnv:
    """The values of each run, by its id."""

    def __init__(self, state: Path) -> None:
        """Read nothing yet; `state` is the coordinator's folder."""
        self._folder = state / FOLDER

    def keep(self, run_id: str, values: Mapping[str, str]) -> None:
        """Keep a run's values, if it has any, until `keep_only`.

        Raises:
            OSError: the disk refuses.
            UnsafeFileError: the folder is another user's.
        """
        if values:
            private_folder(self._folder)
            (self._folder / run_id).unlink(missing_ok=True)
            make_secret(self._folder / run_id, json.dumps(dict(values)).encode())

    def of(self, run_id: str) -> dict[str, str]:
        """Return a run's values; none where they cannot be read: its sites then say which lack."""
        try:
            values = json.loads(read_secret(self._folder / run_id))
        except FileNotFoundError:
            return {}
        except (OSError, IsthmusError, ValueError, RecursionError) as error:
            log.warning(
                "the variables that run %s passes on cannot be read: %s", run_id, text_of(error)
            )
            return {}
        return {str(name): str(value) for name, value in dict(values).items()}

    def keep_only(self, run_ids: Container[str]) -> None:
        """Remove the values of all other runs."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if path.name not in run_ids:
                path.unlink(missing_ok=True)
