"""Brings a run's carried folder from the coordinator to a site's agent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1.control_pb2 import BlobPart
from isthmus.protos.errors import CorruptDataError, IsthmusError
from isthmus.sites.node.carried import folder_of, missing_of
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.site_data import Told, fetched
from isthmus.topology.spec.run_spec import RunSpec

GIVE_UP_S = 60.0
"""A transfer in which nothing has come for so long ends the run at the site."""
AGAIN_S = 0.5
TOLD_S = 1.0

WHAT = "fetching the job's folder"

log = logging.getLogger(__name__)

Get = Callable[[Sequence[str]], AsyncIterator[BlobPart]]


async def fetch(blobs: Blobs, spec: RunSpec, get: Get, told: Told) -> None:
    """Have all contents of a run's folder here; a connection that breaks is tried again.

    Raises:
        SiteError: nothing comes for GIVE_UP_S, or what comes is not valid.
    """
    begun_s = came_s = time.monotonic()
    loop, num_fetched = asyncio.get_running_loop(), 0
    while missing := await asyncio.to_thread(missing_of, blobs, spec):
        total = _num_bytes(blobs, spec, missing)
        done, next_s = 0, 0.0
        try:
            async with asyncio.timeout(GIVE_UP_S) as limit:
                async for part in get(missing):
                    limit.reschedule(loop.time() + GIVE_UP_S)
                    await asyncio.to_thread(blobs.take, part)
                    came_s, done = time.monotonic(), done + len(part.data)
                    num_fetched += part.is_last
                    if came_s >= next_s:
                        told(fetched(WHAT, done, total))
                        next_s = came_s + TOLD_S
        except TimeoutError as error:
            told_s = f"nothing of the job's folder has come for {GIVE_UP_S:g} s"
            raise SiteError("TIMED_OUT", told_s) from error
        except IsthmusError as error:
            is_wrong = not error.retryable or isinstance(error, CorruptDataError)
            if is_wrong or time.monotonic() - came_s > GIVE_UP_S:
                raise SiteError(error.code, f"the job's folder: {error}") from error
            log.info("%s: %s: trying again", WHAT, error)
            await asyncio.sleep(AGAIN_S)
    if num_fetched:
        log.info("%s: %d files in %.2f s", WHAT, num_fetched, time.monotonic() - begun_s)


def _num_bytes(blobs: Blobs, spec: RunSpec, missing: Sequence[str]) -> int:
    """Return the size of what is missing; 0: not known before the list is there."""
    assert spec.carried is not None
    if spec.carried.digest in missing:
        return 0
    folder = folder_of(blobs, spec)
    assert folder is not None
    sizes = {file.digest: file.num_bytes for file in folder.files}
    return sum(sizes[digest] for digest in missing)
