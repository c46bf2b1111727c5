"""Replaces a file that a person writes, unless somebody else has changed it meanwhile."""

from __future__ import annotations

import codecs
import os
import shutil
from dataclasses import dataclass
from pathlib import Path


class FileChangedError(Exception):
    """The file is not what it was."""


@dataclass(frozen=True, slots=True)
class Original:
    """A file as it was found."""

    path: Path
    """Where it really is: a symbolic link stays one."""
    content: bytes

    @classmethod
    def read(cls, path: Path) -> Original:
        """Keep what is in the file; OSError if it cannot be read."""
        real = path.resolve()
        return cls(real, real.read_bytes())

    @property
    def text(self) -> str:
        """What it says, without the mark that some editors begin with."""
        return self.content.decode("utf-8-sig")

    def replace(self, text: str) -> None:
        """Put `text` in its place, as a whole or not at all; the mode and the editor's mark stay.

        Raises:
            FileChangedError: somebody else has written it; it is left alone.
            OSError: it cannot be written.
        """
        mark = codecs.BOM_UTF8 if self.content.startswith(codecs.BOM_UTF8) else b""
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with scratch.open("xb") as file:
                file.write(mark + text.encode())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.path, scratch)
            if self.path.read_bytes() != self.content:
                raise FileChangedError(f"{self.path} was changed meanwhile")
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)
