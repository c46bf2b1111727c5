"""The carried folder of a run at a machine: contents come once, and each run has its own copy."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection
from pathlib import Path

from isthmus.protos.blobs import STORE_BYTES, Blobs
from isthmus.protos.errors import IsthmusError
from isthmus.sites.node.failures import SiteError
from isthmus.topology.spec.carried_folder import CarriedFolder
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.run_spec import CODE, RunSpec

STORE = "carried"
"""Folder of an agent's state for contents, which runs share."""


def blobs_of(state: Path) -> Blobs:
    """Return the contents that the machine with that state folder has."""
    return Blobs(state / STORE)


def folder_of(blobs: Blobs, spec: RunSpec) -> CarriedFolder | None:
    """Return the folder that a run carries; None: it carries none.

    Raises:
        SiteError: its list is not there or not valid.
    """
    if spec.carried is None:
        return None
    try:
        return CarriedFolder.from_bytes(blobs.read(spec.carried.digest))
    except ConfigError as error:
        raise SiteError("CORRUPT_DATA", error.problems[0].message) from error
    except IsthmusError as error:
        raise SiteError(error.code, str(error)) from error


def missing_of(blobs: Blobs, spec: RunSpec) -> list[str]:
    """Return the digests of what the machine lacks of a run's folder; first that of its list."""
    assert spec.carried is not None
    if missing := blobs.missing([spec.carried.digest]):
        return missing
    folder = folder_of(blobs, spec)
    assert folder is not None
    return blobs.missing(file.digest for file in folder.files)


def lay_out(blobs: Blobs, spec: RunSpec, run_folder: Path) -> None:
    """Give a run its copy of the carried folder, unless it has it.

    Machines that share the run's folder may do it at once.

    Raises:
        SiteError: a content is missing or has changed, or a link leads out.
        OSError: the disk refuses.
    """
    folder, to = folder_of(blobs, spec), run_folder / CODE
    if folder is None or to.exists():
        return
    scratch = to.with_name(f"{CODE}.{platform.node()}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _write(blobs, folder, scratch)
        if not to.exists():
            scratch.rename(to)
    except IsthmusError as error:
        raise SiteError(error.code, str(error)) from error
    except OSError:
        if not to.exists():  # else another machine was sooner
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    blobs.keep_within(STORE_BYTES, _used(spec, folder))


def _write(blobs: Blobs, folder: CarriedFolder, to: Path) -> None:
    to.mkdir()
    for path in folder.empty_folders:
        (to / path).mkdir(parents=True, exist_ok=True)
    for file in folder.files:
        place = to / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        blobs.copy(file.digest, place)
        place.chmod(file.mode)
    for link in folder.links:  # after the files: none is written through a link
        place = to / link.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(link.target)
    root = Path(os.path.realpath(to))
    for link in folder.links:
        if not Path(os.path.realpath(to / link.path)).is_relative_to(root):
            raise SiteError("CORRUPT_DATA", f"the carried link {link.path!r} leads out")


def _used(spec: RunSpec, folder: CarriedFolder) -> Collection[str]:
    assert spec.carried is not None
    return {spec.carried.digest, *(file.digest for file in folder.files)}
