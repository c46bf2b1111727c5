"""Data at a site: checked where it lies, fetched where it does not, else told by name."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from isthmus.protos import metrics
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.order import DATA, SiteOrder, make_order, read_spec
from isthmus.sites.node.site_data import DataAtSite
from tests.fakes.agent_bench import job_yaml, prepare, topology_yaml

TEXT = b"corpus" * 1000
DIGEST = hashlib.sha256(TEXT).hexdigest()


def order_of(folder: Path, data: str) -> SiteOrder:
    message = prepare(topology_yaml(), job_yaml() + f"data: [{data}]\n")
    return make_order(message, read_spec(message, "a"), "a", folder)


def provide(folder: Path, data: str) -> list[str]:
    """Provide data; return what was told."""
    told: list[str] = []
    order = order_of(folder, data)
    DataAtSite(order, folder, lambda metric: told.append(metric.labels[metrics.WHAT])).provide()
    return told


@pytest.fixture
def url() -> str:
    with fsspec.open("memory://bucket/corpus.bin", "wb") as file:
        file.write(TEXT)
    return "memory://bucket/corpus.bin"


def test_a_url_is_fetched_once_and_found_by_its_name(tmp_path: Path, url: str) -> None:
    data = f"{{url: '{url}', digest: 'sha256:{DIGEST}'}}"
    assert "fetching corpus.bin" in provide(tmp_path, data)
    order = order_of(tmp_path, data)
    assert (order.folder / DATA / "corpus.bin").read_bytes() == TEXT
    assert order.environment([])["ISTHMUS_DATA"] == str(order.folder / DATA)
    fsspec.filesystem("memory").rm("/bucket/corpus.bin")
    assert provide(tmp_path, data) == [], "neither fetched nor hashed again"


def test_a_url_with_a_path_is_kept_there(tmp_path: Path, url: str) -> None:
    place = tmp_path / "scratch" / "train.bin"
    provide(tmp_path, f"{{url: '{url}', path: {place}, size: {len(TEXT)}B}}")
    assert place.read_bytes() == TEXT


def test_a_folder_that_lies_there_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    (folder / "one").write_bytes(b"12")
    (folder / "deep" / "two").write_bytes(b"345")
    provide(tmp_path, f"{{path: {folder}, size: 5B}}")
    with pytest.raises(SiteError, match="has 5 bytes, and the job says 6"):
        provide(tmp_path, f"{{path: {folder}, size: 6B}}")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("path: /nowhere/x, size: 3B", r"data.0 at site a: there is no /nowhere/x: put it there"),
        ("url: 'memory://bucket/other', size: 3B", r"memory://bucket/other cannot be fetched"),
        ("url: 'nosuch://bucket/file', size: 3B", r"nosuch"),
        ("url: 'memory://bucket/corpus.bin', size: 3B", r"has 6000 bytes, and the job says 3"),
        (
            f"url: 'memory://bucket/corpus.bin', digest: 'sha256:{'0' * 64}'",
            rf"has sha256:{DIGEST}, and the job says sha256:0",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_site(
    tmp_path: Path, url: str, data: str, told: str
) -> None:
    for _ in range(2):  # nothing wrong is left behind for the next run
        with pytest.raises(SiteError, match=told) as caught:
            provide(tmp_path, f"{{{data}}}")
        assert caught.value.code == "DATA_MISSING"


def test_a_read_that_breaks_goes_on_where_it_was(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = MemoryFile.read, list[int]()

    def breaking(file: MemoryFile, size: int = -1) -> bytes:
        reads.append(file.tell())
        if len(reads) == 2:
            raise ConnectionResetError("reset by peer")
        part: bytes = read(file, min(size, 4000))
        return part

    monkeypatch.setattr("isthmus.sites.node.site_data.AGAIN_S", 0)
    monkeypatch.setattr(MemoryFile, "read", breaking)
    provide(tmp_path, f"{{url: '{url}', size: 6000B}}")
    assert reads == [0, 4000, 4000, 6000]


def test_a_fetch_ends_soon_once_its_run_does(tmp_path: Path, url: str) -> None:
    order = order_of(tmp_path, f"{{url: '{url}', size: 6000B}}")
    data = DataAtSite(order, tmp_path, lambda *_: None)
    data.stop()
    thread = threading.Thread(target=data.provide)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert not (order.folder / DATA).exists()
