"""A relay whose links change while connections cross them, with real sockets in this process."""

import asyncio
import random

import pytest

from isthmus.orchestrator.emulator.emulator_config import Apply
from isthmus.orchestrator.emulator.link_shape import LinkShape, Transmitter
from isthmus.orchestrator.emulator.owner_pipes import REQUESTS
from isthmus.orchestrator.emulator.relay_connection import SharedLink
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import line_of
from tests.fakes.relay_worlds import World, seconds, world
from tests.fakes.waiting import until

THERE, BACK = {"source": "eu", "target": "us"}, {"source": "us", "target": "eu"}


def change(kind: str, link: dict[str, str] = THERE, **figures: float) -> Change:
    return Change(kind=kind, source=link["source"], target=link["target"], **figures)


async def nothing_comes(reader: asyncio.StreamReader) -> None:
    """Show that a byte that would take no time to arrive has not, a while after it was sent."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.readexactly(1)


async def test_a_cut_holds_what_is_on_its_way_and_heal_lets_it_cross_in_order() -> None:
    async with world(delay_s=0.02) as wan:
        near, far = await wan.connect()
        near[1].write(b"before")
        await until(lambda: wan.sent_bytes("eu", "us") == 6)
        wan.relay.apply([change("cut")])
        near[1].write(b" during")
        near[1].write_eof()
        await nothing_comes(far[0])
        took_s, arrived = await healed(wan, far[0])
        assert arrived == b"before during"
        assert took_s >= 0.019


async def healed(wan: World, reader: asyncio.StreamReader) -> tuple[float, bytes]:
    """Heal all; return how long it took until the end of what then arrived."""
    wan.relay.apply([change("heal"), change("heal", BACK)])
    return await seconds(reader.read())


async def test_a_cut_of_one_way_stops_the_senders_of_both() -> None:
    """What the other way holds still arrives; then no acknowledgement comes back, and it stops."""

    async with world(delay_s=0.02) as wan:
        near, far = await wan.connect()
        far[1].write(b"x")
        await until(lambda: wan.sent_bytes("us", "eu") == 1)
        wan.relay.apply([change("cut")])
        assert await near[0].readexactly(1) == b"x"
        far[1].write(b"y")
        await nothing_comes(near[0])
        wan.relay.apply([change("heal")])
        assert await near[0].readexactly(1) == b"y"


async def test_a_cut_link_takes_no_more_than_its_sockets_buffer() -> None:
    async with world(1e9, 0.0) as wan:
        near, far = await wan.connect()
        wan.relay.apply([change("cut")])
        near[1].write(bytes(8 << 20))
        await nothing_comes(far[0])
        assert wan.relay.counters().links[0]["queued_bytes"] == 0
        wan.relay.apply([change("heal")])
        await far[0].readexactly(8 << 20)


@pytest.mark.parametrize("link", [THERE, BACK])
async def test_nothing_answers_a_connection_that_is_dialled_across_a_cut(
    link: dict[str, str],
) -> None:
    async with world() as wan:
        wan.relay.apply([change("cut", link)])
        connecting = asyncio.create_task(wan.connect())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(connecting)
        assert wan.relay.num_connections == 0
        wan.relay.apply([change("heal", link)])
        near, far = await connecting
        near[1].write(b"x")
        assert await far[0].readexactly(1) == b"x"


async def test_what_waits_for_the_transmitter_leaves_at_the_new_rate() -> None:
    """40 KB at 100 kB/s are 0.4 s; at 100 MB/s nothing."""

    async with world(1e5) as wan:
        near, far = await wan.connect()
        near[1].write(bytes(40_000))
        await until(lambda: wan.sent_bytes("eu", "us") == 40_000)
        wan.relay.apply([change("shape", bytes_per_s=1e8)])
        await far[0].readexactly(40_000)
        wan.relay.apply([change("shape", bytes_per_s=1e6)])
        near[1].write(bytes(40_000))
        took_s, _ = await seconds(far[0].readexactly(40_000))
        assert took_s >= 0.039
        wan.relay.apply([change("heal")])
        assert wan.relay.counters().links[0]["delivered_bytes"] == 80_000


async def test_a_longer_delay_holds_for_what_is_sent_after_it() -> None:
    async with world() as wan:
        near, far = await wan.connect()
        wan.relay.apply([change("shape", delay_s=0.05)])
        near[1].write(b"x")
        took_s, _ = await seconds(far[0].readexactly(1))
        assert took_s >= 0.049


async def test_a_loss_stalls_the_connection_it_hits_for_a_round_trip() -> None:
    async with world(delay_s=0.02) as wan:
        near, far = await wan.connect()
        wan.relay.apply([change("shape", loss=1.0)])
        near[1].write(b"x")
        took_s, _ = await seconds(far[0].readexactly(1))
        assert took_s >= 0.059
        assert wan.relay.counters().links[0]["lost_packets"] == 1
        far[1].write(b"y")
        await near[0].readexactly(1)
        assert wan.relay.counters().links[1]["lost_packets"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_seed_loses_the_same_packets(seed: int) -> None:
    """By the count, of one stream: 1 % of 2,900 packets, in pieces that the kernel chooses."""

    async def lost() -> int:
        async with world(1e9, seed=seed) as wan:
            near, far = await wan.connect()
            wan.relay.apply([change("shape", loss=0.01)])
            near[1].write(bytes(4 << 20))
            await far[0].readexactly(4 << 20)
            return int(wan.relay.counters().links[0]["lost_packets"])

    assert 29 - 8 <= await lost() <= 29 + 8, f"{seed=}"


async def test_a_reset_ends_every_connection_of_the_two_sites_at_both_ends() -> None:
    async with world(delay_s=5.0) as wan:
        pairs = [await wan.connect() for _ in range(2)]
        wan.relay.apply([change("reset", BACK)])
        for end in (end for pair in pairs for end in pair):
            with pytest.raises(ConnectionResetError):
                await end[0].read()
        assert wan.relay.num_connections == 0
        near, far = await wan.connect()
        wan.relay.apply([change("shape", delay_s=0.0)])
        near[1].write(b"x")
        assert await far[0].readexactly(1) == b"x"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_bytes_survive_any_changes_in_order(seed: int) -> None:
    """Two connections send both ways while rate, delay, jitter, loss and cuts change at random."""

    chance = random.Random(seed)
    message = chance.randbytes(200_000)

    async def send(writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(message), 1000):
            writer.write(message[start : start + 1000])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()

    async with world(1e7, 0.002, seed) as wan:
        ends = [end for _ in range(2) for end in await wan.connect()]
        async with asyncio.TaskGroup() as tasks:
            arrived = [tasks.create_task(reader.read()) for reader, _ in ends]
            for _, writer in ends:
                tasks.create_task(send(writer))
            for _ in range(150):
                wan.relay.apply([anything(chance)])
                await asyncio.sleep(0.001)
            wan.relay.apply([change("heal"), change("heal", BACK)])
        assert all(task.result() == message for task in arrived), f"{seed=}"
        for link in wan.relay.counters().links:
            assert link["sent_bytes"] == link["delivered_bytes"] == 400_000, f"{seed=}"
            assert link["queued_bytes"] == 0, f"{seed=}"


def anything(chance: random.Random) -> Change:
    kind, link = chance.choice(("shape", "shape", "cut", "heal")), chance.choice((THERE, BACK))
    figures = {
        "bytes_per_s": chance.choice((1e5, 1e6, 1e8)),
        "delay_s": chance.choice((0.0, 0.001, 0.01)),
        "jitter_s": chance.choice((0.0, 0.005)),
        "loss": chance.choice((0.0, 0.1, 1.0)),
    }
    chosen = chance.sample(sorted(figures), chance.randint(1, 4)) if kind == "shape" else []
    return change(kind, link, **{name: figures[name] for name in chosen})


async def test_changes_of_one_message_are_made_all_or_none() -> None:
    async with world() as wan:
        wrong = Change(kind="cut", source="eu", target="mars")
        with pytest.raises(ConfigError, match=r"changes\.1: there is no link from eu to mars"):
            wan.relay.apply([change("cut"), wrong])
        near, far = await wan.connect()
        near[1].write(b"x")
        assert await far[0].readexactly(1) == b"x"


async def test_leaving_ends_what_is_cut() -> None:
    async with world() as wan:
        near, _ = await wan.connect()
        wan.relay.apply([change("cut")])
        await wan.relay.__aexit__(None, None, None)
        with pytest.raises(ConnectionResetError):
            await near[0].read()
        assert wan.relay.num_connections == 0


def test_changes_survive_the_line() -> None:
    changes = (change("cut"), change("shape", BACK, bytes_per_s=1e6, loss=0.5))
    assert REQUESTS.read(line_of(Apply(changes=changes))).changes == changes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("x", "the line is not JSON"),
        ("[]", "want an object"),
        ('{"op": "stop", "changes": []}', "want an object with one of the ops apply"),
        ('{"op": "apply", "changes": {}}', "changes: want a list"),
        ('{"op": "apply", "changes": [7]}', r"changes\.0: want an object"),
        ('{"op": "apply", "changes": [{"kind": "cut"}]}', r"changes\.0\.source is missing"),
    ],
)
def test_another_line_is_told(wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        REQUESTS.read(wrong.encode())


def test_healing_gives_back_all_figures_as_configured() -> None:
    shape = LinkShape(source="eu", target="us", bytes_per_s=1e6, delay_s=0.1, loss=0.1)
    link = SharedLink(Transmitter(shape, random.Random(0).random, random.Random(0)))
    link.reshape({"delay_s": 3.0, "loss": 0.0}, 7.0)
    link.reshape({"bytes_per_s": 5.0, "jitter_s": 0.1}, 8.0)
    link.cut()
    assert link.is_cut
    link.heal(9.0)
    assert not link.is_cut
    assert link.shape == shape


def test_a_shape_keeps_what_a_change_does_not_name() -> None:
    shape = LinkShape(source="eu", target="us", bytes_per_s=1e6, delay_s=0.1, queue_bytes=5000)
    assert shape.changed({"loss": 0.5, "delay_s": 0.2}) == LinkShape(
        source="eu", target="us", bytes_per_s=1e6, delay_s=0.2, loss=0.5, queue_bytes=5000
    )
    assert shape.room_bytes == 5000
