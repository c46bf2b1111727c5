"""The files of the training state that a rejoining site takes over, in a node's folder.

FOLDER/entry/epoch-7/   at each node: for sites that rejoin with epoch 7 tensors parameters and the
    optimizer's tensors: the same bytes at all sites objects everything else, written by torch.save:
    equivalent at all sites index.json digests of all pieces; written last

Ranks write and read the files (sites/checkpoint/entry_state.py). Gateways transfer them to the
rejoining site (sites/gateway/transfer).
"""

from __future__ import annotations

import errno
import json
import mmap
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from isthmus.protos.errors import RemoteProtocolError
from isthmus.topology.spec.units import format_size

PIECE_BYTES: Final = 4 << 20
"""Size of a piece, which is requested at once and has its own digest."""
TENSORS: Final = "tensors"
OBJECTS: Final = "objects"
INDEX: Final = "index.json"
SPARE_BYTES: Final = 256 << 20
"""Disk space left free for other writers."""
_ENTRY: Final = "entry"


def entry_folder(node_folder: Path, epoch: int) -> Path:
    """Return the folder of the state for sites that rejoin with an epoch."""
    return node_folder / _ENTRY / f"epoch-{epoch}"


def remove_states(node_folder: Path, *, but: Path | None = None) -> None:
    """Remove all states of a node except `but`, as far as possible."""
    for folder in (node_folder / _ENTRY).glob("epoch-*"):
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def newest_whole(node_folder: Path) -> Path | None:
    """Return the folder of a node's newest complete state; None: there is none."""
    found = (each.parent for each in (node_folder / _ENTRY).glob(f"epoch-*/{INDEX}"))
    return max(found, key=lambda each: int(each.name.partition("-")[2]), default=None)


def require_room(folder: Path, num_bytes: int) -> None:
    """Check that a disk has room for a state beside other writers.

    Raises:
        OSError: there is no room, or no such folder.
    """
    tensors = folder / TENSORS
    held_bytes = tensors.stat().st_blocks * 512 if tensors.exists() else 0
    free_bytes = shutil.disk_usage(folder).free + held_bytes
    if free_bytes < num_bytes + SPARE_BYTES:
        wanted, free = format_size(num_bytes + SPARE_BYTES), format_size(free_bytes)
        raise OSError(errno.ENOSPC, f"it takes {wanted}, and {free} are free", str(folder))


@dataclass(frozen=True, slots=True)
class Index:
    """The files of a state, with sizes and digests."""

    num_bytes: Mapping[str, int]
    """File sizes by name."""
    digests: Mapping[str, tuple[int, ...]]
    """xxh3-64 of the pieces, by file name."""

    def to_bytes(self) -> bytes:
        """Return the serialised index."""
        fields = {
            name: {"num_bytes": size, "digests": self.digests[name]}
            for name, size in self.num_bytes.items()
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, written: bytes) -> Index:
        """Parse an index from `to_bytes`.

        Raises:
            RemoteProtocolError: the bytes are not a valid index.
        """
        try:
            fields = json.loads(written)
            index = cls(
                {name: int(fields[name]["num_bytes"]) for name in (TENSORS, OBJECTS)},
                {name: tuple(map(int, fields[name]["digests"])) for name in (TENSORS, OBJECTS)},
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RemoteProtocolError("no index of a training state") from error
        if any(
            size < 0 or len(index.digests[name]) != num_pieces(size)
            for name, size in index.num_bytes.items()
        ):
            raise RemoteProtocolError("an index of a training state without all digests")
        return index


def num_pieces(num_bytes: int) -> int:
    """Return the number of pieces of a file."""
    return -(-num_bytes // PIECE_BYTES)


def digest_of(piece: bytes | memoryview) -> int:
    """Return the xxh3-64 of a piece."""
    return xxhash.xxh3_64_intdigest(piece)


def digests_in(
    path: Path, pieces: Iterable[int], on_hashed: Callable[[int], None] = lambda _: None
) -> dict[int, int]:
    """Return the digests of some pieces of a file, by their numbers.

    `on_hashed` gets the size of each hashed piece.
    """
    if not path.stat().st_size:
        return {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        digests = {}
        for piece in pieces:
            with memoryview(mapped)[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES] as view:
                digests[piece] = digest_of(view)
                on_hashed(len(view))
        return digests
