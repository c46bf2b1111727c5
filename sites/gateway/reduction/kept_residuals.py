"""Saves a rank's residuals to a checkpoint's file, and loads them in a resumed run.

The file is an npz with one float32 array per chunk, named `BUCKET-LAYOUT-NUMEL-CHUNK-KIND`, and the
chunk size of the grid. With another chunk size all residuals are dropped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.protos.errors import LocalProtocolError
from isthmus.protos.failure import text_of
from isthmus.protos.frame import Kind
from isthmus.sites.gateway.reduction.residuals import KeptResiduals

_GRID = "chunk_numel"


def write_residuals(path: Path, residual: KeptResiduals, chunk_numel: int) -> None:
    """Write residuals atomically to `path`, and make missing folders.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    named: dict[str, npt.NDArray[Any]] = {
        "-".join(map(str, (*key[:4], int(key[4])))): values for key, values in residual.items()
    }
    named[_GRID] = np.array(chunk_numel)
    with part.open("wb") as file:
        np.savez(file, **named)  # type: ignore[arg-type] # names are keywords
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def read_residuals(path: Path, chunk_numel: int) -> KeptResiduals:
    """Read residuals that `write_residuals` wrote; empty if the grid was another.

    Raises:
        LocalProtocolError: the file is not valid, or cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            if int(stored[_GRID]) != chunk_numel:
                return {}
            residual: KeptResiduals = {}
            for name in stored.files:
                if name != _GRID:
                    bucket, layout, numel, chunk, kind = map(int, name.split("-"))
                    residual[bucket, layout, numel, chunk, Kind(kind)] = stored[name]
            return residual
    except (OSError, ValueError, KeyError) as error:
        raise LocalProtocolError(f"{path}: these are no residuals: {text_of(error)}") from error
