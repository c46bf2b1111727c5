"""Writes a checkpoint's parameters and buffers as one safetensors file.

Usage: python -m isthmus.sites.checkpoint.export PLACE FILE

The file has whole tensors under the names of `model.state_dict()`, for any other tool. All of them
are in memory at once.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from isthmus.protos.checkpoint.manifest import MANIFEST
from isthmus.protos.checkpoint.store import StoredCheckpoint, storage_errors
from isthmus.protos.errors import BadCheckpointError
from isthmus.protos.failure import text_of
from isthmus.sites.checkpoint.reader import storage_reader
from isthmus.sites.checkpoint.training_state import MODEL, Tensors


def model_tensors(place: str) -> Tensors:
    """Return a checkpoint's parameters and buffers by their names, in host memory."""
    reader = storage_reader(place)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        path: torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        for path, found in stored.items()
        if path.startswith(MODEL) and isinstance(found, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # A single process is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return {path.removeprefix(MODEL): each for path, each in tensors.items()}


def main(arguments: list[str]) -> int:
    """Write the file; return 0, or 1 after saying why not."""
    place, file = arguments
    part = Path(f"{file}.part")
    try:
        manifest = StoredCheckpoint(place).verified()
        about = {"format": "pt", "run": manifest.run, "step": str(manifest.step)}
        part.touch()  # raises the system's error if the folder is not writable
        with storage_errors(place):
            tensors = model_tensors(place)
        save_file(tensors, part, metadata=about)
        part.rename(file)
    except (BadCheckpointError, OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        sys.stderr.write(f"{text_of(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    assert len(sys.argv) == 3, f"want the place of a {MANIFEST}, and a file"
    sys.exit(main(sys.argv[1:]))
