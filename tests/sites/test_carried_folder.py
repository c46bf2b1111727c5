"""A carried folder: what is packed, what is refused, and the copy that a run has at a site."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from isthmus.orchestrator.packing import pack
from isthmus.protos import metrics
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1.control_pb2 import BlobPart
from isthmus.protos.errors import CorruptDataError, PeerLostError, RemoteProtocolError
from isthmus.sites.agent import carried as fetching
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.node import carried
from isthmus.sites.node.failures import SiteError
from isthmus.topology.spec.carried_folder import (
    Carried,
    CarriedFile,
    CarriedFolder,
    CarriedLink,
    changes,
    digest_of,
)
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.run_spec import CODE, RunSpec
from tests.fakes.agent_bench import job_yaml, topology_yaml
from tests.fakes.run_specs import spec_of_texts

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def laid(folder: Path, **texts: str) -> Path:
    """Write files; `__` in a name is a slash."""
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def packed_paths(folder: Path, *left_out: Path) -> set[str]:
    return {file.path for file in pack(folder, left_out).folder.files}


def given(store: Blobs, root: Path) -> RunSpec:
    """Give a machine all of a folder, and return a run that carries it."""
    packed = pack(root)
    for path in packed.paths.values():
        store.put(path.read_bytes())
    digest = store.put(packed.folder.to_bytes())
    spec = spec_of_texts(job_yaml(), topology_yaml())
    return dataclasses.replace(spec, carried=Carried(digest=digest, source=str(root)))


def test_rules_of_git_and_our_own_leave_files_out(tmp_path: Path) -> None:
    """The innermost rule wins, and in one folder ours comes after git's."""
    root = laid(tmp_path / "repository" / "project", out__x="", data__big="", keep__me="")
    laid(root, sub__big="", sub__deep__big="")
    (root / "a.py").touch()
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "a.pyc").touch()
    (root.parent / ".git").mkdir()
    (root.parent / ".gitignore").write_text("/project/out/\n")
    (root / ".gitignore").write_text("big\nkeep/\n")
    (root / ".isthmusignore").write_text("!keep/\n")
    (root / "sub" / ".isthmusignore").write_text("!big\n")
    rules = {".gitignore", ".isthmusignore", "sub/.isthmusignore"}
    assert packed_paths(root) == rules | {"a.py", "keep/me", "sub/big", "sub/deep/big"}


def test_outputs_keys_and_environments_are_never_carried(tmp_path: Path) -> None:
    root = laid(tmp_path, train="", certs__ca="", env__lib="", runs__log="")
    (root / "certs" / "ca.key").write_text("-----BEGIN PRIVATE KEY-----\nMIG\n")
    (root / "env" / "pyvenv.cfg").touch()
    found = pack(root, [root / "runs"])
    assert {file.path for file in found.folder.files} == {"train", "certs/ca"}
    assert found.num_keys == 1


def test_modes_links_and_empty_folders_come_along(tmp_path: Path) -> None:
    root = laid(tmp_path / "root", tool="x", sub__file="y")
    (root / "tool").chmod(0o750)
    (root / "link").symlink_to("sub/file")
    (root / "out").mkdir()
    store, run_folder = Blobs(tmp_path / "store"), tmp_path / "r1"
    run_folder.mkdir()
    carried.lay_out(store, given(store, root), run_folder)
    copy = run_folder / CODE
    assert (copy / "tool").stat().st_mode & 0o777 == 0o750
    assert (copy / "link").readlink() == Path("sub/file")
    assert (copy / "link").read_text() == "y"
    assert list((copy / "out").iterdir()) == []
    (copy / "tool").write_text("the run's own")
    carried.lay_out(store, given(store, root), run_folder)
    assert (copy / "tool").read_text() == "the run's own", "a run keeps its copy"
    assert [path.name for path in run_folder.iterdir()] == [CODE]


def test_a_link_out_of_the_folder_is_refused_with_a_cure(tmp_path: Path) -> None:
    root = laid(tmp_path / "root", train="")
    (root / "data").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"root/data: the link leads out .* \.isthmusignore"):
        pack(root)
    (root / ".isthmusignore").write_text("data\n")
    assert "train" in packed_paths(root)


def test_too_large_a_folder_names_the_limit_and_the_largest_files(tmp_path: Path) -> None:
    root = laid(tmp_path, small="x", large="x" * 3000)
    told = (
        r"has 2\.931KiB to carry, and the limit is 2KiB; the largest files are large \(2\.93KiB\)"
    )
    with pytest.raises(ConfigError, match=told):
        pack(root, limit_bytes=2048)
    with pytest.raises(ConfigError, match="more than 1 files to carry"):
        pack(root, limit_files=1)


@pytest.mark.parametrize(
    "path", ["../x", "/x", "a/../../x", "a//x", "", ".", "a/.", "x\0y", "link/x", "file/x"]
)
def test_no_path_leads_out(path: str) -> None:
    def file(name: str) -> CarriedFile:
        return CarriedFile(path=name, mode=0o644, num_bytes=0, digest=EMPTY)

    link = CarriedLink(path="link", target="a")
    with pytest.raises(ConfigError, match="leads out"):
        CarriedFolder(files=(file("file"), file(path)), links=(link,))
    with pytest.raises(ConfigError, match="leads out"):
        CarriedFolder(files=(file("file"),), links=(link,), empty_folders=(path,))


@pytest.mark.parametrize("target", ["/etc/passwd", "../x", "a/../../x"])
def test_no_carried_link_leads_out(target: str) -> None:
    with pytest.raises(ConfigError, match="leads out"):
        CarriedFolder(links=(CarriedLink(path="link", target=target),))


def test_links_that_lead_out_through_each_other_are_refused_at_the_site(tmp_path: Path) -> None:
    """`up` is the folder itself, so that what is above `up` is outside."""
    links = (CarriedLink(path="a/b/up", target="../.."), CarriedLink(path="x", target="a/b/up/.."))
    store = Blobs(tmp_path / "store")
    digest = store.put(CarriedFolder(links=links).to_bytes())
    spec = spec_of_texts(job_yaml(), topology_yaml())
    run = dataclasses.replace(spec, carried=Carried(digest=digest, source="/"))
    with pytest.raises(SiteError, match="'x' leads out"):
        carried.lay_out(store, run, tmp_path)
    assert not list(tmp_path.glob(f"{CODE}*"))


def test_what_is_missing_is_fetched_and_a_broken_connection_goes_on(tmp_path: Path) -> None:
    root = laid(tmp_path / "root", one="1", two="2" * 3_000_000)
    there, here = Blobs(tmp_path / "there"), Blobs(tmp_path / "here")
    spec, asked, told = given(there, root), list[list[str]](), list[Metric]()

    async def get(digests: Sequence[str]) -> AsyncIterator[BlobPart]:
        asked.append(list(digests))
        for number, part in enumerate(there.parts(digests)):
            if len(asked) == 2 and number == 1:
                raise PeerLostError("the connection broke")
            yield part

    asyncio.run(fetching.fetch(here, spec, get, told.append))
    assert [len(each) for each in asked] == [1, 2, 1 if len(asked[2]) == 1 else 2]
    assert carried.missing_of(here, spec) == []
    assert told[-1].values[metrics.TOTAL_BYTES] >= 3_000_000
    (root / "one").write_text("changed")
    asked.clear()
    asyncio.run(fetching.fetch(here, given(there, root), get, told.append))
    assert [len(each) for each in asked] == [1, 1], "the list, and the file that has changed"


def test_a_content_that_is_not_its_digests_is_refused(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    with pytest.raises(CorruptDataError):
        store.take(BlobPart(digest=bytes.fromhex(EMPTY), data=b"x", is_last=True))
    with pytest.raises(RemoteProtocolError):
        store.take(BlobPart(digest=b"../../x", data=b"x", is_last=True))
    with pytest.raises(RemoteProtocolError):
        store.take(BlobPart(digest=bytes.fromhex(EMPTY), offset=3, data=b"x", is_last=True))
    digest = store.put(b"text")
    store.path(digest).write_bytes(b"damaged")
    with pytest.raises(CorruptDataError):
        store.copy(digest, tmp_path / "copy")
    assert store.missing([digest]) == [digest]


def test_a_site_without_the_list_says_so(tmp_path: Path) -> None:
    spec = dataclasses.replace(
        spec_of_texts(job_yaml(), topology_yaml()), carried=Carried(digest=EMPTY, source="/")
    )
    with pytest.raises(SiteError, match="has no content"):
        carried.lay_out(Blobs(tmp_path), spec, tmp_path)


def test_what_was_used_least_recently_is_forgotten_first(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    digests = [store.put(bytes([number]) * 100) for number in range(4)]
    for age, digest in enumerate(digests):
        path = store.path(digest)
        os.utime(path, (0, age))
    store.keep_within(250, {digests[0]})
    assert store.missing(digests) == digests[1:3]


def test_changes_name_files_and_lines() -> None:
    kept: dict[str, str] = {}

    def file(path: str, text: str, mode: int = 0o644) -> CarriedFile:
        digest = digest_of(text.encode())
        kept[digest] = text
        return CarriedFile(path=path, mode=mode, num_bytes=len(text), digest=digest)

    before = CarriedFolder(files=(file("a", "one\ntwo\n"), file("b", "x"), file("gone", "")))
    after = CarriedFolder(files=(file("a", "one\n2\n"), file("b", "x", 0o755), file("new", "")))
    assert changes(before, after, kept.get) == [
        "a: changed",
        "  line 2: -two",
        "  line 2: +2",
        "b: mode 644 is now 755",
        "gone: removed",
        "new: new",
    ]
    assert changes(before, before, kept.get) == []
