"""Reads the list of tensors of a PyTorch checkpoint without running code that it may hold.

torch.distributed.checkpoint pickles that list, `.metadata`, and a pickle can call anything. This
module admits only the types that the list consists of.
"""

from __future__ import annotations

import pickle
from enum import Enum, EnumType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from isthmus.protos.errors import BadCheckpointError
from isthmus.protos.failure import text_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
else:
    try:  # its name from torch 2.15 on
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
    except ModuleNotFoundError:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}

_DAMAGED = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
)
"""Exceptions of pickle for invalid bytes."""


def _member(enumeration: type[Enum], name: str) -> Enum:
    """Return an enum member by name: Python before 3.11.4 pickles it as a class attribute.

    Raises:
        UnpicklingError: there is no such member.
    """
    if not (isinstance(enumeration, EnumType) and name in enumeration.__members__):
        raise pickle.UnpicklingError(f"{name!r} is no member of {enumeration!r}")
    return enumeration[name]


class _Unpickler(pickle.Unpickler):
    """Unpickles lists of tensors, and refuses all other types."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as pickle has it
        """Return the class that a pickle names.

        Raises:
            UnpicklingError: the class does not belong to a list of tensors.
        """
        if module == metadata.__name__ and isinstance(getattr(metadata, name, None), type):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a list of tensors")


class PlainReader(FileSystemReader):
    """Reads a checkpoint from a folder."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:  # noqa: ANN401 - as torch has it
        """Return the list of tensors.

        Raises:
            BadCheckpointError: the list is damaged, or would run code.
        """
        path = self.fs.concat_path(self.path, ".metadata")
        try:
            with self.fs.create_stream(path, "rb") as stream:
                tensors = _Unpickler(stream).load()
        except _DAMAGED as error:
            raise BadCheckpointError(f"{path} cannot be read: {text_of(error)}") from error
        if not isinstance(tensors, metadata.Metadata):
            raise BadCheckpointError(f"{path} cannot be read: it is no list of tensors")
        if tensors.storage_meta is None:
            tensors.storage_meta = metadata.StorageMeta()
        tensors.storage_meta.load_id = self.load_id
        return tensors


class PlainUrlReader(PlainReader, FsspecReader):
    """Reads a checkpoint from a URL."""
