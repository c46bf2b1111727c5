"""The training state that a site takes over when it enters a run, as it lies in a node's folder.

FOLDER/entry/epoch-7/   at each node: for whoever enters with epoch 7
   tensors              parameters and the optimizer's tensors: the same bytes at all sites
   objects              everything else, as torch.save writes it: it means the same at all sites
   index.json           digests of all pieces; written last

Ranks write it and read it (sites/checkpoint/entry_state.py). Gateways carry it from those who have
it to the site that enters (sites/gateway/transfer).
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
"""What is asked for at once, and has a digest."""
TENSORS: Final = "tensors"
OBJECTS: Final = "objects"
INDEX: Final = "index.json"
SPARE_BYTES: Final = 256 << 20
"""So much of a disk is left to all else that writes there."""
_ENTRY: Final = "entry"


def entry_folder(node_folder: Path, epoch: int) -> Path:
    """Return where the state lies that sites take over with an epoch."""
    return node_folder / _ENTRY / f"epoch-{epoch}"


def remove_states(node_folder: Path, *, but: Path | None = None) -> None:
    """Remove all states of a node but one, as far as that can be done."""
    for folder in (node_folder / _ENTRY).glob("epoch-*"):
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def newest_whole(node_folder: Path) -> Path | None:
    """Return the newest state of a node of which all is there; None: there is none."""
    found = (each.parent for each in (node_folder / _ENTRY).glob(f"epoch-*/{INDEX}"))
    return max(found, key=lambda each: int(each.name.partition("-")[2]), default=None)


def require_room(folder: Path, num_bytes: int) -> None:
    """Refuse a state for which there is no room beside what other processes write.

    Raises:
        OSError: there is none, or there is no such folder.
    """
    tensors = folder / TENSORS
    held_bytes = tensors.stat().st_blocks * 512 if tensors.exists() else 0
    free_bytes = shutil.disk_usage(folder).free + held_bytes
    if free_bytes < num_bytes + SPARE_BYTES:
        wanted, free = format_size(num_bytes + SPARE_BYTES), format_size(free_bytes)
        raise OSError(errno.ENOSPC, f"it takes {wanted}, and {free} are free", str(folder))


@dataclass(frozen=True, slots=True)
class Index:
    """What a state consists of."""

    num_bytes: Mapping[str, int]
    """The size of each file, by its name."""
    digests: Mapping[str, tuple[int, ...]]
    """xxh3-64 of each file's pieces."""

    def to_bytes(self) -> bytes:
        """Return the index as it is written and sent."""
        fields = {
            name: {"num_bytes": size, "digests": self.digests[name]}
            for name, size in self.num_bytes.items()
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, written: bytes) -> Index:
        """Read what `to_bytes` returned.

        Raises:
            RemoteProtocolError: it is something else.
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
    """Return how many pieces a file has."""
    return -(-num_bytes // PIECE_BYTES)


def digest_of(piece: bytes | memoryview) -> int:
    """Return the xxh3-64 of a piece."""
    return xxhash.xxh3_64_intdigest(piece)


def digests_in(
    path: Path, pieces: Iterable[int], on_hashed: Callable[[int], None] = lambda _: None
) -> dict[int, int]:
    """Return the digests of some pieces of a file, by their numbers.

    `on_hashed` is told the bytes of each.
    """
    if not path.stat().st_size:
        return {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        found = {}
        for piece in pieces:
            with memoryview(mapped)[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES] as view:
                found[piece] = digest_of(view)
                on_hashed(len(view))
        return found
