"""The others' state is fetched from their gateways: in pieces, from all at once, and whole."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from isthmus.orchestrator.emulator.emulator_config import RelayEndpoint
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.emulator.wan_fixture import Wan
from isthmus.protos.errors import (
    PeerLostError,
    RemoteProtocolError,
    StaleGenerationError,
    failure_of,
)
from isthmus.protos.exchange.v1 import state_pb2
from isthmus.protos.security import LoopbackSecurity
from isthmus.sites.gateway.links.calls import Call, ServedCall, ask, deadline
from isthmus.sites.gateway.links.frame_calls import dial
from isthmus.sites.gateway.links.frame_listener import FrameListener
from isthmus.sites.gateway.links.keep_alive import Patience
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import SESSION_KEY
from isthmus.sites.gateway.links.wire_loop import WireLoop
from isthmus.sites.gateway.transfer import state_fetch
from isthmus.sites.gateway.transfer.state_fetch import Donor, PieceBook, StateFetch
from isthmus.sites.gateway.transfer.state_server import READ_METHOD, StateServer
from isthmus.sites.local.entry_folder import (
    INDEX,
    OBJECTS,
    PIECE_BYTES,
    SPARE_BYTES,
    TENSORS,
    Index,
    digests_in,
    entry_folder,
    num_pieces,
)
from isthmus.sites.local.rank_messages import StateProgress

MIB = 1 << 20
WITHIN_S = 60.0
SESSION = "a-session"
SECURITY = LoopbackSecurity("s" * 64)
PATIENCE = Patience(connect_s=5.0, idle_s=5.0, lost_s=10.0)
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


def site_of(call: ServedCall) -> str:
    if dict(call.invocation_metadata()).get(SESSION_KEY) != SESSION:
        raise StaleGenerationError("an unknown session: say Hello first")
    return "b"


class Served:
    """State servers of some folders, on ports of this machine."""

    def __init__(self) -> None:
        self._wire = WireLoop.acquire()
        self._listeners: list[FrameListener] = []

    def serve(self, run_folder: Path, bytes_per_s: Mapping[str, float] | None = None) -> int:
        async def start() -> int:
            server = StateServer(run_folder, site_of, bytes_per_s or {})
            listening = socket.create_server(("127.0.0.1", 0))
            self._listeners.append(FrameListener(listening, server.methods, SECURITY, PATIENCE, 64))
            self._listeners[-1].begin()
            return int(listening.getsockname()[1])

        return self._wire.run(start()).result(WITHIN_S)

    def close(self) -> None:
        async def stop() -> None:
            for listener in self._listeners:
                await listener.close()

        futures.wait([self._wire.run(stop())], WITHIN_S)
        WireLoop.release()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


def donor(port: int, site: str = "a", *, session: str = SESSION) -> Donor:
    def connect(method: str) -> AbstractAsyncContextManager[Call]:
        metadata = ((SESSION_KEY, session),)
        return dial(("127.0.0.1", port), method, metadata, SECURITY, "a.gateway", PATIENCE)

    return Donor(f"site {site}", connect)


def fetch(run_folder: Path, *donors: Donor, timeout_s: float = WITHIN_S) -> StateFetch:
    return StateFetch(donors, EPOCH, entry_folder(run_folder, EPOCH), timeout_s=timeout_s)


def run(taking: StateFetch) -> None:
    """Fetch, on the loop of those who serve."""
    wire = WireLoop.acquire()
    try:
        wire.run(taking.run()).result(WITHIN_S)
    finally:
        WireLoop.release()


def files_of(run_folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in entry_folder(run_folder, EPOCH).iterdir()}


def test_two_donors_give_all_pieces(tmp_path: Path, served: Served) -> None:
    donors = []
    for site in "ac":
        make_state(tmp_path / site, 9 * MIB + 3)
        donors.append(donor(served.serve(tmp_path / site), site))
    taking = fetch(tmp_path / "b", *donors)
    run(taking)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    assert taking.fetched_bytes == 9 * MIB + 3 + len(b"any")


def test_a_link_that_is_reset_twice_costs_a_piece_each_time(
    tmp_path: Path, served: Served, wan: Wan, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_state(tmp_path / "a", 24 * MIB)
    port = served.serve(tmp_path / "a")
    pair = [("b", "a"), ("a", "b")]
    links = [LinkShape(source=s, target=t, bytes_per_s=40e6, delay_s=0.005) for s, t in pair]
    [dial] = wan(
        links, [RelayEndpoint(source="b", target="a", gateway=0, host="127.0.0.1", port=port)]
    )
    taking = fetch(tmp_path / "b", donor(dial.port))
    note_come, resets_at = taking._note_come, [4 * MIB, 12 * MIB]

    def note_and_reset(num_bytes: int) -> None:
        note_come(num_bytes)
        if resets_at and taking.fetched_bytes >= resets_at[0]:
            del resets_at[0]
            wan.run_faults("version: 1\nfaults: [{at: 0s, reset: [b, a]}]")

    monkeypatch.setattr(taking, "_note_come", note_and_reset)
    run(taking)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    assert taking.fetched_bytes == 24 * MIB + 3, "what had come was not asked for again"
    assert 1 <= taking.num_again <= 2
    sent_bytes = wan.counters()["a", "b"]["delivered_bytes"]
    assert sent_bytes < 24 * MIB + 2 * PIECE_BYTES + MIB


def test_it_waits_until_the_state_is_there(tmp_path: Path, served: Served) -> None:
    donors = [donor(served.serve(tmp_path / site), site) for site in "ac"]
    taking = fetch(tmp_path / "b", *donors)
    thread = threading.Thread(target=run, args=(taking,))
    thread.start()
    for site in "ac":
        make_state(tmp_path / site, 5 * MIB)
    thread.join(WITHIN_S)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


def test_no_more_of_a_link_is_taken_than_may_be(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 16 * MIB)
    port = served.serve(tmp_path / "a", {"b": 40 * MIB})
    begun_s = time.monotonic()
    run(fetch(tmp_path / "b", donor(port)))
    assert time.monotonic() - begun_s >= 12 / 40, "the first piece leaves at once"


@pytest.mark.slow
def test_who_may_take_little_of_a_link_is_not_taken_for_silent(
    tmp_path: Path, served: Served
) -> None:
    make_state(tmp_path / "a", 9 * MIB, objects=bytes(5 * MIB))
    port = served.serve(tmp_path / "a", {"b": PIECE_BYTES / 1.6})
    taking = fetch(tmp_path / "b", donor(port), timeout_s=1.2)
    run(taking)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    assert taking.num_again == 0


@pytest.mark.slow
async def test_who_does_not_wait_for_a_piece_takes_no_turn(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 9 * MIB)
    port = served.serve(tmp_path / "a", {"b": PIECE_BYTES / 1.0})
    request = state_pb2.ReadRequest(epoch=EPOCH, path=TENSORS)

    async with donor(port).connect(READ_METHOD) as call:
        assert (await ask(call, request, state_pb2.ReadResponse)).data
    for _ in range(30):
        with contextlib.suppress(CallError):
            async with donor(port).connect(READ_METHOD) as call, deadline(0.01):
                assert (await ask(call, request, state_pb2.ReadResponse)).wait_s > 0
    begun_s = time.monotonic()
    run(fetch(tmp_path / "b", donor(port)))
    assert time.monotonic() - begun_s < 15.0, "four pieces, a second each"


def test_who_has_another_state_or_none_is_passed_over(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 5 * MIB)
    make_state(tmp_path / "c", 5 * MIB)
    damaged = entry_folder(tmp_path / "c", EPOCH) / TENSORS
    damaged.write_bytes(bytes(5 * MIB))
    donors = [donor(served.serve(tmp_path / site), site) for site in ("none", "a", "c")]
    run(fetch(tmp_path / "b", *donors))
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
    with pytest.raises(PeerLostError, match=r"3B of 5MiB in .* s; site c: it has another digest"):
        run(fetch(tmp_path / "d", donors[2], timeout_s=1.0))
    assert not entry_folder(tmp_path / "d", EPOCH).exists(), "of no use"
    stranger = donor(served.serve(tmp_path / "a"), "x", session="?")
    with pytest.raises(PeerLostError, match="site x: an unknown session"):
        run(fetch(tmp_path / "e", stranger, timeout_s=0.5))


class Script:
    """What a donor that is no process answers, and how long that takes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, Iterable[object]]
    ) -> None:
        self._answers = {name: iter(each) for name, each in answers.items()}
        self.now_s = 0.0
        self.takes_s = 20.0
        monkeypatch.setattr(state_fetch, "_AGAIN_S", 1e-4)
        monkeypatch.setattr(state_fetch, "_AGAIN_MAX_S", 1e-4)
        monkeypatch.setattr(state_fetch, "_Connection", self._connect)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(state_fetch, "time", clock)

    def _connect(self, donor: Donor, _: object) -> SimpleNamespace:
        async def index(epoch: int) -> object:
            assert epoch == EPOCH
            self.now_s += self.takes_s
            return next(self._answers[donor.name])

        async def read(_: int, path: str, piece: int, index: Index) -> bytes:
            self.now_s += self.takes_s
            size = index.num_bytes[path] - piece * PIECE_BYTES
            return bytes(min(PIECE_BYTES, size))

        return SimpleNamespace(index=index, read=read)


def scripted(*names: str) -> list[Donor]:
    def connect(_method: str) -> AbstractAsyncContextManager[Call]:
        raise AssertionError("it is no process")

    return [Donor(name, connect) for name in names]


def written_so_far(num_bytes: int, problem: str = "") -> state_pb2.IndexResponse:
    return state_pb2.IndexResponse(done_bytes=num_bytes, problem=problem)


def index_of(num_bytes: int) -> Index:
    return Index(
        {TENSORS: num_bytes, OBJECTS: 3}, {TENSORS: (0,) * num_pieces(num_bytes), OBJECTS: (0,)}
    )


def test_who_gets_on_with_writing_is_waited_for_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> Iterator[object]:
        yield from (written_so_far(each * MIB) for each in range(100))
        script.takes_s = 0.0  # threads that read side by side would add up to a silence
        yield index_of(9 * MIB)

    script = Script(monkeypatch, {"a": answers()})
    taking = fetch(tmp_path, *scripted("a"), timeout_s=30.0)
    run(taking)
    assert script.now_s > 2000.0
    assert taking.fetched_bytes == 9 * MIB + 3
    assert set(files_of(tmp_path)) == {TENSORS, OBJECTS, INDEX}


def test_who_does_not_get_on_with_writing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, {"a": itertools.repeat(written_so_far(5 * MIB))})
    with pytest.raises(PeerLostError, match="epoch 7 could be had: a: it is being written, 5MiB"):
        run(fetch(tmp_path, *scripted("a"), timeout_s=30.0))
    assert script.now_s > 30.0
    assert not entry_folder(tmp_path, EPOCH).exists()


def test_time_in_which_this_process_stood_still_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> Iterator[object]:
        yield written_so_far(5 * MIB)
        script.now_s += 100.0
        yield written_so_far(5 * MIB)
        yield index_of(9 * MIB)

    script = Script(monkeypatch, {"a": answers()})
    script.takes_s = 0.0
    taking = fetch(tmp_path, *scripted("a"), timeout_s=30.0)
    run(taking)
    assert taking.fetched_bytes == 9 * MIB + 3


class Broken:
    """An index without digests: to read a piece of it is a bug."""

    num_bytes: Mapping[str, int] = {TENSORS: 5 * MIB, OBJECTS: 0}
    digests: Mapping[str, tuple[int, ...]] = {}


def test_a_bug_in_a_task_that_fetches_is_told(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_state(tmp_path / "a", 5 * MIB)
    taking = fetch(tmp_path / "b", donor(served.serve(tmp_path / "a")), timeout_s=5.0)

    async def broken() -> Broken:
        return Broken()

    monkeypatch.setattr(taking, "_take_index", broken)
    with pytest.raises(KeyError, match=TENSORS):
        run(taking)
    assert not entry_folder(tmp_path / "b", EPOCH).exists()


def test_who_cannot_write_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [written_so_far(7, "rank 0: /state: No space left")]
    script = Script(monkeypatch, {"a": full, "b": full})
    with pytest.raises(PeerLostError, match=r"a: rank 0: /state: No space left; b: rank 0: /st"):
        run(fetch(tmp_path, *scripted("a", "b"), timeout_s=1000.0))
    assert script.now_s == 40.0, "each is asked once"


def test_a_transfer_takes_as_long_as_pieces_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, {"a": [index_of(80 * MIB)]})
    run(fetch(tmp_path, *scripted("a"), timeout_s=30.0))
    assert script.now_s > 20 * 20.0


def test_a_transfer_that_is_ended_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, {"a": [index_of(12 * MIB)]})
    taking = fetch(tmp_path, *scripted("a"), timeout_s=30.0)

    async def never(_: object) -> int:
        script.now_s += 100.0
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(PieceBook, "take", never)
    monkeypatch.setattr(state_fetch, "Standstills", lambda *_: SimpleNamespace(look=lambda *_: 0))
    with pytest.raises(PeerLostError, match=r"as a whole: 3B of 12MiB in 140.0 s, nothing for 100"):
        run(taking)
    assert not entry_folder(tmp_path, EPOCH).exists()


def test_a_state_for_which_there_is_no_room_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(monkeypatch, {"a": [index_of(12 * MIB)]})
    free = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match="it takes 268MiB, and 256MiB are free"):
        run(fetch(tmp_path, *scripted("a"), timeout_s=30.0))
    assert not entry_folder(tmp_path, EPOCH).exists()


def test_a_disk_that_is_full_by_then_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(monkeypatch, {"a": [index_of(12 * MIB)]})
    taking = fetch(tmp_path, *scripted("a"), timeout_s=30.0)

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(OSError, match="No space left") as raised:
        run(taking)
    assert (
        failure_of(raised.value).message
        == f"{entry_folder(tmp_path, EPOCH)}: No space left on device"
    )


def test_a_gateway_says_how_far_its_ranks_are_with_the_latest_state(tmp_path: Path) -> None:
    server = StateServer(tmp_path, lambda _: "b", {})

    def asked() -> state_pb2.IndexResponse:
        request = state_pb2.IndexRequest(epoch=EPOCH)
        answer = asyncio.run(server._index(request, cast("ServedCall", None)))
        assert isinstance(answer, state_pb2.IndexResponse)
        return answer

    server.note(0, StateProgress(epoch=EPOCH - 2, done_bytes=99))
    server.note(0, StateProgress(epoch=EPOCH, done_bytes=3))
    server.note(1, StateProgress(epoch=EPOCH, done_bytes=4))
    server.note(1, StateProgress(epoch=EPOCH - 2, done_bytes=99))
    assert asked() == written_so_far(7)
    server.note(1, StateProgress(epoch=EPOCH, done_bytes=5, problem="No space left"))
    assert asked() == written_so_far(8, "No space left")
    make_state(tmp_path, 3)
    assert Index.from_bytes(asked().index).num_bytes[TENSORS] == 3


def test_only_a_state_can_be_read(tmp_path: Path, served: Served) -> None:
    make_state(tmp_path / "a", 3)
    (tmp_path / "a" / "entry" / "secret").write_text("x")
    server = StateServer(tmp_path / "a", site_of, {})
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
        b'{"tensors": {"num_bytes": 1e999, "digests": []}, "objects": {}}',
        b'{"tensors": {"num_bytes": 3, "digests": [1e999]}, "objects": {}}',
    ],
)
def test_an_index_has_a_digest_for_each_piece(written: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="index of a training state"):
        Index.from_bytes(written)


async def test_pieces_are_given_to_whoever_asks_until_all_have_come() -> None:
    book = PieceBook(2)
    assert [await book.take(), await book.take()] == [0, 1]
    await book.put_back(0)
    assert await book.take() == 0
    await book.note_done()
    assert not book.is_complete
    await book.note_done()
    assert book.is_complete
    assert await book.take() is None
