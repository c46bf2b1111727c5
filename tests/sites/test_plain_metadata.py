"""A checkpoint's list of tensors is read without running what a pickle may hold."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from isthmus.protos.errors import BadCheckpointError
from isthmus.sites.checkpoint.place import SHARED
from isthmus.sites.checkpoint.reader import storage_reader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


class Attribute:
    """Is an attribute of a class when it is unpickled."""

    def __init__(self, of: type, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, (self.of, self.name)


def written(folder: Path) -> Path:
    """Write a checkpoint of every kind of value; return its folder."""
    values = {
        "float": torch.arange(6.0).reshape(2, 3),
        "bfloat": torch.ones(3, dtype=torch.bfloat16),
        "long": torch.tensor([1 << 40]),
        "number": 7,
        "text": "words",
    }
    save(values, checkpoint_id=folder / SHARED, no_dist=True)
    return folder


@pytest.mark.parametrize("as_url", [False, True], ids=["folder", "url"])
def test_an_honest_list_is_read(tmp_path: Path, as_url: bool) -> None:
    place = str(written(tmp_path))
    reader = storage_reader(f"file://{place}" if as_url else place)
    stored = reader.read_metadata().state_dict_metadata
    assert sorted(stored) == ["bfloat", "float", "long", "number", "text"]
    found = {"float": torch.zeros(2, 3)}
    load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["float"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04garbage", pickle.dumps([1, 2])], ids=["empty", "garbage", "list"]
)
def test_what_is_no_list_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (written(tmp_path) / SHARED / ".metadata").write_bytes(content)
    with pytest.raises(BadCheckpointError, match=r"\.metadata cannot be read"):
        storage_reader(str(tmp_path)).read_metadata()


def test_no_code_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (written(tmp_path) / SHARED / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(BadCheckpointError, match="mkdir is no part of a list of tensors"):
        storage_reader(str(tmp_path)).read_metadata()
    assert not made.exists()


def refusal(folder: Path, attribute: Attribute) -> str:
    """Return why a list that is an attribute of a class is refused."""
    (written(folder) / SHARED / ".metadata").write_bytes(pickle.dumps(attribute))
    with pytest.raises(BadCheckpointError) as refused:
        storage_reader(str(folder)).read_metadata()
    return str(refused.value)


@pytest.mark.parametrize(
    ("of", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "mro"), (Metadata, "missing")]
)
def test_no_attribute_but_a_member_of_an_enumeration_is_read(
    tmp_path: Path, of: type, name: str
) -> None:
    """An attribute's attributes lead to any code."""
    assert f"{name!r} is no member of" in refusal(tmp_path, Attribute(of, name))


def test_a_member_is_read_as_python_before_3_11_4_pickles_it(tmp_path: Path) -> None:
    found = refusal(tmp_path, Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    assert found.endswith("it is no list of tensors"), "which it is not, but it was read"
