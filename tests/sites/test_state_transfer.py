"""A checkpoint is fetched from other sites' gateways: in pieces, from all at once, and whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import grpc.aio
import pytest
import xxhash

from orchestrator.emulator.emulator_config import RelayEndpoint
from orchestrator.emulator.link_shape import LinkShape
from orchestrator.emulator.wan_fixture import Wan
from protos.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from protos.checkpoint.store import StoredCheckpoint
from protos.errors import BadCheckpointError, PeerLostError, StaleGenerationError
from sites.gateway.links.peer_server import Context, abort, session_of
from sites.gateway.links.wire_loop import WireLoop
from sites.gateway.transfer.state_fetch import Donor, Piece, PieceBook, StateFetch
from sites.gateway.transfer.state_server import PIECE_BYTES, StateServer

MIB = 1 << 20
WITHIN_S = 60.0
SESSION = "a-session"
NAME = "step-00000007"


def make_checkpoint(store: Path, sizes: dict[str, int], seed: int = 7) -> Manifest:
    """Write a checkpoint of random bytes."""
    draw, files = random.Random(seed), []
    for path, num_bytes in sizes.items():
        data = draw.randbytes(num_bytes)
        target = store / NAME / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        files.append(StoredFile(path, num_bytes, xxhash.xxh3_128_hexdigest(data)))
    manifest = Manifest(run="r", job="j", step=7, written_s=0.0, ranks={"a": 1}, files=tuple(files))
    (store / NAME / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


async def site_of(context: Context) -> str:
    if session_of(context) != SESSION:
        await abort(context, StaleGenerationError("an unknown session: say Hello first"))
    return "b"


class Served:
    """State servers of some stores, on ports of this machine."""

    def __init__(self) -> None:
        self._wire = WireLoop.acquire()
        self._servers: list[grpc.aio.Server] = []

    def serve(self, store: Path) -> int:
        async def start() -> int:
            server = grpc.aio.server()
            StateServer(store, site_of).register(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self._servers.append(server)
            return port

        return self._wire.run(start()).result(WITHIN_S)

    def close(self) -> None:
        async def stop() -> None:
            for server in self._servers:
                await server.stop(0)

        futures.wait([self._wire.run(stop())], WITHIN_S)
        WireLoop.release()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


def donor(
    port: int, site: str = "a", *, session: str = SESSION, bytes_per_s: float = float("inf")
) -> Donor:
    def opened() -> grpc.Channel:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", PIECE_BYTES + 1024),
        ]
        return grpc.insecure_channel(f"127.0.0.1:{port}", options=options)

    return Donor(site, session, opened, bytes_per_s)


def files_of(store: Path) -> dict[str, bytes]:
    root = store / NAME
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_two_donors_give_all_pieces_of_all_files(tmp_path: Path, served: Served) -> None:
    sizes = {"model/0.bin": 9 * MIB + 3, "rng.bin": 17, "empty": 0}
    stores = [tmp_path / "a", tmp_path / "c"]
    for store in stores:
        make_checkpoint(store, sizes)
    donors = [donor(served.serve(store), store.name) for store in stores]
    fetch = StateFetch(donors, tmp_path / "b", timeout_s=WITHIN_S)
    name, manifest = fetch.run()
    assert (name, manifest.step) == (NAME, 7)
    assert files_of(tmp_path / "b") == files_of(stores[0])
    assert fetch.fetched_bytes == sum(sizes.values())
    again = StateFetch(donors, tmp_path / "b", timeout_s=WITHIN_S)
    again.run()
    assert again.fetched_bytes == 0, "it is there already"


def test_a_link_that_is_reset_twice_costs_a_piece_each_time(
    tmp_path: Path, served: Served, wan: Wan
) -> None:
    make_checkpoint(tmp_path / "a", {"model": 24 * MIB})
    port = served.serve(tmp_path / "a")
    pair = [("b", "a"), ("a", "b")]
    links = [LinkShape(source=s, target=t, bytes_per_s=40e6, delay_s=0.005) for s, t in pair]
    [dial] = wan(
        links, [RelayEndpoint(source="b", target="a", gateway=0, host="127.0.0.1", port=port)]
    )
    wan.run_faults("version: 1\nfaults: [{at: 200ms, reset: [b, a]}, {at: 400ms, reset: [b, a]}]")
    fetch = StateFetch([donor(dial.port)], tmp_path / "b", timeout_s=WITHIN_S)
    fetch.run(NAME)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    assert fetch.fetched_bytes == 24 * MIB, "what had come was not asked for again"
    sent_bytes = wan.counters()["a", "b"]["delivered_bytes"]
    assert sent_bytes < 24 * MIB + 2 * PIECE_BYTES + MIB


def test_a_transfer_goes_on_where_another_ended(tmp_path: Path, served: Served) -> None:
    make_checkpoint(tmp_path / "a", {"model": 12 * MIB})
    part = tmp_path / "b" / f".{NAME}.part"
    part.mkdir(parents=True)
    data = (tmp_path / "a" / NAME / "model").read_bytes()
    (part / "model").write_bytes(data[:PIECE_BYTES])
    (part / ".pieces").write_text(f"0 model\n{PIECE_BYTES} mod")  # the last line is torn
    fetch = StateFetch([donor(served.serve(tmp_path / "a"))], tmp_path / "b", timeout_s=WITHIN_S)
    fetch.run()
    assert fetch.fetched_bytes == 8 * MIB
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


def test_a_donor_without_it_or_of_another_session_is_passed_over(
    tmp_path: Path, served: Served
) -> None:
    make_checkpoint(tmp_path / "a", {"model": 5 * MIB})
    full = served.serve(tmp_path / "a")
    donors = [donor(served.serve(tmp_path / "none"), "c"), donor(full)]
    StateFetch(donors, tmp_path / "b", timeout_s=WITHIN_S).run(NAME)
    with pytest.raises(PeerLostError, match="site a: an unknown session"):
        StateFetch([donor(full, session="x")], tmp_path / "d", timeout_s=0.5).run(NAME)


def test_a_damaged_checkpoint_is_not_given_away(tmp_path: Path, served: Served) -> None:
    make_checkpoint(tmp_path / "a", {"model": MIB})
    path = tmp_path / "a" / NAME / "model"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(PeerLostError, match="no checkpoint"):
        StateFetch([donor(served.serve(tmp_path / "a"))], tmp_path / "b", timeout_s=0.5).run(NAME)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
def test_a_path_that_leads_out_of_the_folder_is_refused(
    tmp_path: Path, served: Served, path: str
) -> None:
    store = tmp_path / "a"
    make_checkpoint(store, {"model": 3})
    listed = Manifest(
        run="r",
        job="j",
        step=7,
        written_s=0.0,
        ranks={},
        files=(StoredFile(path, 3, "0"),),
    )

    class Bad(StateServer):
        def _read_manifest(self, name: str) -> tuple[str, bytes]:
            return NAME, listed.to_bytes()

    wire = WireLoop.acquire()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        Bad(store, site_of).register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = wire.run(start()).result(WITHIN_S)
    try:
        with pytest.raises(BadCheckpointError, match="is no path"):
            StateFetch([donor(port)], tmp_path / "b", timeout_s=WITHIN_S).run(NAME)
    finally:
        wire.run(server.stop(0)).result(WITHIN_S)
        WireLoop.release()
    assert not (tmp_path / "x").exists()
    assert isinstance(StoredCheckpoint(str(store / NAME)).manifest(), Manifest)


def test_pieces_are_given_to_whoever_asks_until_all_have_come() -> None:
    manifest = Manifest(
        run="",
        job="",
        step=0,
        written_s=0.0,
        ranks={},
        files=(StoredFile("x", PIECE_BYTES + 1, ""), StoredFile("y", 2, "")),
    )
    book = PieceBook(manifest, frozenset({("x", 0)}))
    first = book.take()
    assert first == Piece("x", PIECE_BYTES, 1)
    second = book.take()
    assert second == Piece("y", 0, 2)
    book.put_back(first)
    assert book.take() == first
    book.note_done()
    assert not book.is_complete
    book.note_done()
    assert book.is_complete
    assert book.take() is None
