"""The list of revoked certificates that a coordinator carries, read anew when its file changes."""

from __future__ import annotations

import logging
from pathlib import Path

from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.mutual_tls import TlsSecurity
from isthmus.protos.revocation import RevocationError

KEPT = "revoked.crl"
"""File of the state folder: the list in force, also for the next coordinator."""

log = logging.getLogger(__name__)


class Revocations:
    """Puts the list beside the authorities' file in force in this process, and each later one."""

    def __init__(self, security: TlsSecurity, state: Path) -> None:
        """Put the list in force that the coordinator before had, then the one that is there now.

        Raises:
            RevocationError: there are lists, and none can be used.
        """
        self._security = security
        self._kept = state / KEPT
        self._looked_at: tuple[int, int] | None = None
        self.problem = ""
        """Why the file's content is not in force; empty: it is, or there is none."""
        try:
            if self._kept.exists():
                security.take_revoked(self._kept.read_text(errors="replace"))
        except (IsthmusError, OSError) as error:
            self.problem = f"{self._kept}: {_why(error)}"
        self.look()
        if self.problem and security.revoked is None:
            raise RevocationError(self.problem)

    @property
    def text(self) -> str:
        """The list in force (PEM); empty: there is none."""
        revoked = self._security.revoked
        return "" if revoked is None else revoked.text

    def has(self, certificate: bytes) -> bool:
        """Whether a certificate (PEM) is revoked."""
        revoked = self._security.revoked
        return revoked is not None and bool(certificate) and revoked.has(certificate)

    def look(self) -> bool:
        """Read the file if it has changed; return whether a new list is in force.

        A list that cannot be used changes nothing but `problem`.
        """
        path = self._security.files.revocations
        try:
            found = path.stat()
            version = found.st_mtime_ns, found.st_size
            if version == self._looked_at:
                return False
            self._looked_at = version
            text = path.read_text(errors="replace")
            is_new = self._security.take_revoked(text)
            if is_new:
                write_atomically(self._kept, text)
        except FileNotFoundError:
            return False
        except (IsthmusError, OSError) as error:
            self.problem = f"{path}: {_why(error)}"
            return False
        self.problem = ""
        return is_new


def _why(error: IsthmusError | OSError) -> str:
    return str(error) if isinstance(error, IsthmusError) else text_of(error)
