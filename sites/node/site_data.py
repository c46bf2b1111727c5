"""The data that a job wants at its sites: checked where it lies, fetched where it does not."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec

from isthmus.protos import metrics
from isthmus.protos.failure import reason_of, text_of
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.order import DATA, SiteOrder
from isthmus.topology.spec.site_data import SiteData

READ_BYTES = 4 << 20
TRIES = 5
"""Reads in a row that bring nothing before a fetch is given up."""
AGAIN_S = 1.0
TOLD_S = 1.0

Told = Callable[[Metric], None]


def fetched(what: str, done_bytes: float, total_bytes: float) -> Metric:
    """Return a report of what is fetched or checked before the ranks start; 0 bytes: unknown."""
    values = {metrics.DONE_BYTES: done_bytes, metrics.TOTAL_BYTES: total_bytes}
    return Metric(kind=metrics.FETCH, values=values, labels={metrics.WHAT: what})


class _NotWantedError(Exception):
    """The run ends meanwhile."""


class DataAtSite:
    """Brings one run's data to one machine, in a thread; `stop` ends that early."""

    def __init__(self, order: SiteOrder, state: Path, told: Told) -> None:
        self._order = order
        self._store = state.resolve() / DATA
        self._told = told
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Have `provide` end soon."""
        self._stopping.set()

    def provide(self) -> None:
        """Have all of it here, and links to it in the run's folder.

        Raises:
            SiteError: something is not there, cannot be fetched, or is not what it should be.
        """
        for index, data in enumerate(self._order.spec.job.data):
            try:
                self._provide(data)
            except _NotWantedError:
                return
            except _WrongError as error:
                raise SiteError(
                    "DATA_MISSING", f"data.{index} at site {self._order.site.name}: {error}"
                ) from error

    def _provide(self, data: SiteData) -> None:
        place = self._place(data)
        if data.url is not None and not place.exists():
            with self._holding(place):
                if not place.exists():
                    self._fetch(data, data.url, place)
        self._check(data, place)
        if data.path is None:
            link = self._order.folder / DATA / data.name
            link.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(place)

    def _place(self, data: SiteData) -> Path:
        if data.path is not None:
            return self._order.working_folder / data.path
        named = data.digest or hashlib.sha256(f"{data.url} {data.num_bytes}".encode()).hexdigest()
        return self._store / named / data.name

    def _check(self, data: SiteData, place: Path) -> None:
        """Require size and digest; a digest is computed once for a file that stays as it is."""
        if not place.exists():
            raise _WrongError(f"there is no {place}: put it there, or give it a `url`")
        if place.is_dir():
            if data.digest is not None:
                raise _WrongError(f"{place} is a folder, and a digest is a file's: give a `size`")
            found = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
        else:
            found = place.stat().st_size
        if data.num_bytes not in (None, found):
            raise _WrongError(f"{place} has {found} bytes, and the job says {data.num_bytes}")
        if data.digest is None:
            return
        status = place.stat()
        known = self._store / f"{data.digest}.checked"
        as_checked = f"{place} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        with contextlib.suppress(OSError):
            if known.read_text() == as_checked:
                return
        with place.open("rb") as file:
            self._require_digest(data, place, file, status.st_size)
        self._store.mkdir(parents=True, exist_ok=True)
        known.write_text(as_checked)

    def _require_digest(self, data: SiteData, place: Path, file: IO[bytes], num_bytes: int) -> None:
        digest = hashlib.sha256()
        for part in self._parts(f"checking {data.name}", file, 0, num_bytes):
            digest.update(part)
        if digest.hexdigest() != data.digest:
            raise _WrongError(
                f"{place} has sha256:{digest.hexdigest()}, and the job says sha256:{data.digest}"
            )

    def _fetch(self, data: SiteData, url: str, place: Path) -> None:
        """Fetch a file as a whole; a read that breaks goes on where it was."""
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = place.with_name(f"{place.name}.part")
        failed, done = 0, 0
        with scratch.open("wb") as to:
            while True:
                begun = done
                try:
                    with fsspec.open(url, "rb") as source:
                        num_bytes = data.num_bytes or getattr(source, "size", None) or 0
                        self._require_room(place, num_bytes)
                        if done:
                            source.seek(done)
                        what = f"fetching {data.name}"
                        for part in self._parts(what, source, done, num_bytes):
                            to.write(part)
                            done += len(part)
                    break
                except (_NotWantedError, _WrongError):
                    scratch.unlink(missing_ok=True)
                    raise
                except ImportError as error:
                    raise _WrongError(f"{url}: {text_of(error)}: install it at the site") from error
                except Exception as error:  # file systems raise what they like
                    failed = 1 if done > begun else failed + 1
                    if failed >= TRIES or isinstance(error, FileNotFoundError | PermissionError):
                        scratch.unlink(missing_ok=True)
                        raise _WrongError(f"{url} cannot be fetched: {reason_of(error)}") from error
                    self._stopping.wait(AGAIN_S)
        scratch.replace(place)
        try:
            self._check(data, place)
        except _WrongError as error:
            place.unlink(missing_ok=True)
            raise _WrongError(f"{url}: {error}") from error

    def _parts(
        self, what: str, file: IO[bytes], done_bytes: int, num_bytes: int
    ) -> Iterator[bytes]:
        """Yield a file from where it is in parts, and tell how far it is now and then."""
        next_s = 0.0
        while part := file.read(READ_BYTES):
            if self._stopping.is_set():
                raise _NotWantedError
            done_bytes += len(part)
            if time.monotonic() >= next_s:
                self._told(fetched(what, done_bytes, num_bytes))
                next_s = time.monotonic() + TOLD_S
            yield part

    def _require_room(self, place: Path, num_bytes: int) -> None:
        free = shutil.disk_usage(place.parent).free
        if num_bytes > free:
            raise _WrongError(
                f"{place.parent} has {free >> 20} MiB free, and {place.name} has {num_bytes >> 20} MiB: "
                "name a `path` on a larger disk"
            )

    @contextmanager
    def _holding(self, place: Path) -> Iterator[None]:
        """Fetch a file at one machine of those that share its folder, while others wait."""
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(f".{place.name}.lock").open("w") as lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                what = f"waiting for {place.name}, which another machine fetches"
                self._told(fetched(what, 0, 0))
                if self._stopping.wait(AGAIN_S):
                    raise _NotWantedError
            yield


class _WrongError(Exception):
    """Data is not there, or not what it should be; in words."""
