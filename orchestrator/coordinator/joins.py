"""Keeps what join tokens are good for, sealed and in a file each, until they are used.

STATE/joins/HOLDER.json   {"site", "ends_wall_s", "sealed"}; removed before it is handed out, and
                          after its use was written down
"""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path

from isthmus.orchestrator.run_folder.home import read_object
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.errors import PermissionDeniedError, RemoteProtocolError
from isthmus.protos.limits import JOIN_BYTES
from isthmus.protos.private_files import private_folder

FOLDER = "joins"
OFFERS_MAX = 1024
LONGEST_S = 31 * 86_400.0
_HOLDER = re.compile(r"[0-9a-f]{64}")


class Joins:
    """Join tokens that were offered and not used, in a coordinator's state folder."""

    def __init__(self, state: Path) -> None:
        self._folder = state / FOLDER

    def offer(self, holder: str, site: str, ends_wall_s: float, sealed: bytes) -> None:
        """Keep what a token is good for.

        Raises:
            RemoteProtocolError: it is no offer, or there are too many.
            OSError: the disk refuses.
        """
        left_s = ends_wall_s - time.time()
        if _HOLDER.fullmatch(holder) is None or not 0 < len(sealed) <= JOIN_BYTES:
            raise RemoteProtocolError("no offer for a join token")
        if not 0 < left_s <= LONGEST_S:
            raise RemoteProtocolError(f"a join token that ends in {left_s:.0f} s")
        private_folder(self._folder)
        self._forget_ended()
        if sum(1 for _ in self._folder.iterdir()) >= OFFERS_MAX:
            raise RemoteProtocolError(f"{OFFERS_MAX} join tokens have not been used yet")
        text = base64.b64encode(sealed).decode("ascii")
        offer = {"site": site, "ends_wall_s": ends_wall_s, "sealed": text}
        write_atomically(self._path(holder), json.dumps(offer) + "\n")

    def find(self, holder: str, site: str) -> bytes:
        """Return what a token is good for. Do not hand it out before `forget`.

        Raises:
            PermissionDeniedError: it was used before, has ended, or was never offered.
        """
        offer = read_object(self._path(holder))
        if offer.get("site") != site or not _ends_later(offer):
            raise PermissionDeniedError(
                f"this join token of site {site} was used before, has ended, or was never offered"
            )
        return base64.b64decode(str(offer["sealed"]))

    def forget(self, holder: str) -> None:
        """Have a token be good for nothing any more.

        Raises:
            OSError: the disk refuses.
        """
        self._path(holder).unlink(missing_ok=True)

    def _path(self, holder: str) -> Path:
        return self._folder / f"{holder}.json"

    def _forget_ended(self) -> None:
        for path in self._folder.iterdir():
            if not _ends_later(read_object(path)):
                path.unlink(missing_ok=True)


def _ends_later(offer: object) -> bool:
    ends_wall_s = offer.get("ends_wall_s") if isinstance(offer, dict) else None
    return isinstance(ends_wall_s, float) and ends_wall_s > time.time()
