"""Converts the paths of a job's files: relative in the job file, absolute in a run."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Callable
from pathlib import PurePath

from isthmus.topology.spec.exporters import Exporters
from isthmus.topology.spec.job import Checkpoint, Job


def anchored(job: Job, folder: PurePath) -> Job:
    """Return the job with absolute paths; relative ones begin at `folder`."""
    placed = _with_paths(job, lambda path: str(folder / path))
    placed = dataclasses.replace(placed, exporters=_anchored_exporters(job.exporters, folder))
    if job.checkpoint is None:
        return placed
    return dataclasses.replace(placed, checkpoint=anchored_checkpoint(job.checkpoint, folder))


def moved(job: Job, source: PurePath, target: PurePath) -> Job:
    """Return the job with paths in `source` moved to `target`.

    Other paths stay, and so do the checkpoint stores, which all sites share.
    """
    return _with_paths(job, lambda path: moved_path(path, source, target))


def moved_path(path: str, source: PurePath, target: PurePath) -> str:
    """Return a path with `target` in place of `source`; another one as it is."""
    inside = PurePath(posixpath.normpath(path))
    return str(target / inside.relative_to(source)) if inside.is_relative_to(source) else path


def anchored_checkpoint(checkpoint: Checkpoint, folder: PurePath) -> Checkpoint:
    """Return the settings with absolute paths; URLs stay as they are."""
    return dataclasses.replace(
        checkpoint,
        to=tuple(_anchored_place(place, folder) for place in checkpoint.to),
        resume=None if checkpoint.resume is None else _anchored_place(checkpoint.resume, folder),
    )


def _anchored_exporters(exporters: Exporters, folder: PurePath) -> Exporters:
    tensorboard, mlflow = exporters.tensorboard, exporters.mlflow
    if tensorboard is not None and tensorboard.folder is not None:
        tensorboard = dataclasses.replace(tensorboard, folder=str(folder / tensorboard.folder))
    if mlflow is not None and mlflow.uri is not None and mlflow.uri != "databricks":
        mlflow = dataclasses.replace(mlflow, uri=_anchored_place(mlflow.uri, folder))
    return dataclasses.replace(exporters, tensorboard=tensorboard, mlflow=mlflow)


def _anchored_place(place: str, folder: PurePath) -> str:
    return place if "://" in place else str(folder / place)


def _with_paths(job: Job, placed: Callable[[str], str]) -> Job:
    data = job.trainer.data
    files = tuple(placed(pattern) for pattern in data.files)
    return dataclasses.replace(
        job,
        entrypoint=None if job.entrypoint is None else placed(job.entrypoint),
        working_folder=None if job.working_folder is None else placed(job.working_folder),
        trainer=dataclasses.replace(job.trainer, data=dataclasses.replace(data, files=files)),
    )
