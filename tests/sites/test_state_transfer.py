"""The others' state is fetched from their gateways: in pieces, from all at once, and whole."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path

import grpc
import grpc.aio
import pytest

from orchestrator.emulator.emulator_config import RelayEndpoint
from orchestrator.emulator.link_shape import LinkShape
from orchestrator.emulator.wan_fixture import Wan
from protos.errors import PeerLostError, RemoteProtocolError, StaleGenerationError
from sites.gateway.links.peer_server import Context, abort, session_of
from sites.gateway.links.wire_loop import WireLoop
from sites.gateway.transfer.state_fetch import Donor, PieceBook, StateFetch
from sites.gateway.transfer.state_server import StateServer
from sites.local.entry_folder import (
    INDEX,
    OBJECTS,
    PIECE_BYTES,
    TENSORS,
    Index,
    digests_in,
    entry_folder,
    num_pieces,
)

MIB = 1 << 20
WITHIN_S = 60.0
SESSION = "a-session"
EPOCH = 7


def make_state(run_folder: Path, num_bytes: int, *, objects: bytes = b"any") -> Path:
    """Write a state of random bytes: the same in each folder."""
    folder = entry_folder(run_folder, EPOCH)
    folder.mkdir(parents=True)
    (folder / TENSORS).write_bytes(random.Random(num_bytes).randbytes(num_bytes))
    (folder / OBJECTS).write_bytes(objects)
    sizes = {TENSORS: num_bytes, OBJECTS: len(objects)}
    digests = {
        name: tuple(digests_in(folder / name, range(num_pieces(size))).values())
        for name, size in sizes.items()
    }
    (folder / INDEX).write_bytes(Index(sizes, digests).to_bytes())
    return folder


async def site_of(context: Context) -> str:
    if session_of(context) != SESSION:
        await abort(context, StaleGenerationError("an unknown session: say Hello first"))
    return "b"


class Served:
    """State servers of some folders, on ports of this machine."""

    def __init__(self) -> None:
        self._wire = WireLoop.acquire()
        self._servers: list[grpc.aio.Server] = []

    def serve(self, run_folder: Path, bytes_per_s: Mapping[str, float] | None = None) -> int:
        async def start() -> int:
            server = grpc.aio.server()
            StateServer(run_folder, site_of, bytes_per_s or {}).register(server)
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


def donor(port: int, site: str = "a", *, session: str = SESSION) -> Donor:
    def connect() -> tuple[grpc.Channel, str]:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", PIECE_BYTES + 1024),
        ]
        return grpc.insecure_channel(f"127.0.0.1:{port}", options=options), session

    return Donor(f"site {site}", connect)


def fetch(run_folder: Path, *donors: Donor, timeout_s: float = WITHIN_S) -> StateFetch:
    return StateFetch(donors, EPOCH, entry_folder(run_folder, EPOCH), timeout_s=timeout_s)


def files_of(run_folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in entry_folder(run_folder, EPOCH).iterdir()}


def test_two_donors_give_all_pieces(tmp_path: Path, served: Served) -> None:
    donors = []
    for site in "ac":
        make_state(tmp_path / site, 9 * MIB + 3)
        donors.append(donor(served.serve(tmp_path / site), site))
    taking = fetch(tmp_path / "b", *donors)
    taking.run()
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    assert taking.fetched_bytes == 9 * MIB + 3 + len(b"any")


def test_a_link_that_is_reset_twice_costs_a_piece_each_time(
    tmp_path: Path, served: Served, wan: Wan
) -> None:
    make_state(tmp_path / "a", 24 * MIB)
    port = served.serve(tmp_path / "a")
    pair = [("b", "a"), ("a", "b")]
    links = [LinkShape(source=s, target=t, bytes_per_s=40e6, delay_s=0.005) for s, t in pair]
    [dial] = wan(
        links, [RelayEndpoint(source="b", target="a", gateway=0, host="127.0.0.1", port=port)]
    )
    wan.run_faults("version: 1\nfaults: [{at: 200ms, reset: [b, a]}, {at: 400ms, reset: [b, a]}]")
    taking = fetch(tmp_path / "b", donor(dial.port))
    taking.run()
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    assert taking.fetched_bytes == 24 * MIB + 3, "what had come was not asked for again"
    assert 1 <= taking.num_again <= 2
    sent_bytes = wan.counters()["a", "b"]["delivered_bytes"]
    assert sent_bytes < 24 * MIB + 2 * PIECE_BYTES + MIB


def test_it_waits_until_the_state_is_there(tmp_path: Path, served: Served) -> None:
    donors = [donor(served.serve(tmp_path / site), site) for site in "ac"]
    taking = fetch(tmp_path / "b", *donors)
    thread = threading.Thread(target=taking.run)
    thread.start()
    for site in "ac":
        make_state(tmp_path / site, 5 * MIB)
    thread.join(WITHIN_S)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


def test_no_more_of_a_link_is_taken_than_may_be(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 16 * MIB)
    port = served.serve(tmp_path / "a", {"b": 40 * MIB})
    begun_s = time.monotonic()
    fetch(tmp_path / "b", donor(port)).run()
    assert time.monotonic() - begun_s >= 12 / 40, "the first piece leaves at once"


def test_who_has_another_state_or_none_is_passed_over(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 5 * MIB)
    make_state(tmp_path / "c", 5 * MIB)
    damaged = entry_folder(tmp_path / "c", EPOCH) / TENSORS
    damaged.write_bytes(bytes(5 * MIB))
    donors = [donor(served.serve(tmp_path / site), site) for site in ("none", "a", "c")]
    fetch(tmp_path / "b", *donors).run()
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    with pytest.raises(PeerLostError, match="nothing for"):
        fetch(tmp_path / "d", donors[2], timeout_s=1.0).run()
    with pytest.raises(PeerLostError, match="site x: an unknown session"):
        fetch(
            tmp_path / "e", donor(served.serve(tmp_path / "a"), "x", session="?"), timeout_s=0.5
        ).run()


def test_only_a_state_can_be_read(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 3)
    (tmp_path / "a" / "entry" / "secret").write_text("x")
    server = StateServer(tmp_path / "a", site_of, {})
    from protos.exchange.v1 import state_pb2

    for path in ("../secret", INDEX, "", "/etc/hostname"):
        request = state_pb2.ReadRequest(epoch=EPOCH, path=path)
        with pytest.raises(Exception, match="has no piece 0 here"):
            server._read(request)


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"[]",
        b"{}",
        Index({TENSORS: 5 * MIB, OBJECTS: 0}, {TENSORS: (1,), OBJECTS: ()}).to_bytes(),
    ],
)
def test_an_index_has_a_digest_for_each_piece(written: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="index of a training state"):
        Index.from_bytes(written)


def test_pieces_are_given_to_whoever_asks_until_all_have_come() -> None:
    book = PieceBook(2)
    assert [book.take(), book.take()] == [0, 1]
    book.put_back(0)
    assert book.take() == 0
    book.note_done()
    assert not book.is_complete
    book.note_done()
    assert book.is_complete
    assert book.take() is None
