"""What the file system that tests write to can do."""

from pathlib import Path

from isthmus.protos.disk import free_beginning


def has_holes(folder: Path) -> bool:
    """Return whether it can give back a part of a file."""
    probe = folder / "probe"
    probe.write_bytes(b"x")
    try:
        free_beginning(probe, 1)
    except OSError:
        return False
    return probe.read_bytes() == b"\0"
