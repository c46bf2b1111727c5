"""How far gateways may run ahead of their results, and what may lie at their peers for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.reduction.credit import (
    FRAME_OVERHEAD_BYTES,
    Credit,
    Held,
    credit_of_peers,
)
from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.node.gateway_configs import gateway_config as gateway_config_of
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.job import Exchange, Job
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_sites import gateway_config
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import topology_text

NEAR, FAR = (0, 0), (1, 0)
HELD_BYTES = 512 << 20
CHUNK_BYTES = 1 << 20
STRAY_BYTES = 1 << 20


def config_of(
    counts: tuple[int, ...],
    gateway: tuple[int, int],
    ranks: tuple[int, ...] = (),
    pipeline_bytes: int = 0,
) -> GatewayConfig:
    return gateway_config(
        Path("/nowhere"),
        ReductionPlan(len(counts), (), ""),
        *gateway,
        gateways_per_site=counts,
        ranks_per_gateway=ranks or (8,) * len(counts),
        held_bytes=HELD_BYTES,
        chunk_bytes=CHUNK_BYTES,
        pipeline_bytes=pipeline_bytes,
    )


def test_credit_is_taken_at_every_peer_and_given_back_once() -> None:
    credit = Credit({NEAR: 100, FAR: 50})
    credit.take((0, 0, 0), (NEAR, FAR), 30)
    assert not credit.has_room((NEAR, FAR), 30)
    assert credit.has_room((NEAR,), 70)
    assert credit.has_room((), 1000), "what nobody gets needs none"
    credit.give_back((0, 0, 0))
    credit.give_back((0, 0, 0))
    assert credit.num_bytes == 0
    assert credit.has_room((NEAR, FAR), 50)


def test_what_is_kept_of_one_peer_takes_nothing_from_another() -> None:
    held = Held({NEAR: 100, FAR: 100})
    for chunk in range(5):
        held.keep(NEAR, (0, 0, chunk), 20)
    with pytest.raises(RemoteProtocolError, match="round 0 bucket 0 chunk 5"):
        held.keep(NEAR, (0, 0, 5), 20)
    held.keep(FAR, (0, 0, 3), 100)
    assert held.has(FAR, (0, 0, 3))
    assert not held.has(FAR, (0, 0, 4))
    held.release((0, 0, 3))
    held.release((0, 0, 3))
    assert held.num_bytes == 80
    assert not held.has(FAR, (0, 0, 3))


def test_memory_is_divided_among_those_whose_shards_meet() -> None:
    alone = credit_of_peers(config_of((1, 1), (0, 0)))
    assert alone == {(1, 0): HELD_BYTES // 2}
    many = credit_of_peers(config_of((8,) * 5, (3, 5)))
    assert len(many) == 32
    assert {many[site, 5] for site in (0, 1, 2, 4)} == {HELD_BYTES // 8}
    assert max(size for (_, gateway), size in many.items() if gateway != 5) < STRAY_BYTES
    # Of 1 gateway against 4, and 2 more: the narrowest has the least.
    uneven = credit_of_peers(config_of((1, 4, 2), (1, 3)))
    assert uneven[0, 0] == HELD_BYTES // 12
    assert uneven[2, 1] == HELD_BYTES // 6
    assert uneven[2, 0] < STRAY_BYTES


def test_links_are_kept_busy_all_the_same() -> None:
    counts = (1, 64)
    least = 4 * (CHUNK_BYTES + FRAME_OVERHEAD_BYTES)
    assert set(credit_of_peers(config_of(counts, (0, 0))).values()) == {least}
    busy = credit_of_peers(config_of(counts, (0, 0), pipeline_bytes=50 << 20))
    assert set(busy.values()) == {50 << 20}


@pytest.mark.parametrize("seed", range(100))
def test_both_of_a_pair_find_the_same_and_all_of_it_fits(seed: int) -> None:
    chance = random.Random(seed)
    counts = tuple(chance.randint(1, 6) for _ in range(chance.randint(2, 4)))
    of_gateway = {
        (site, gateway): credit_of_peers(config_of(counts, (site, gateway)))
        for site, count in enumerate(counts)
        for gateway in range(count)
    }
    for gateway, credits_ in of_gateway.items():
        for peer, size in credits_.items():
            assert of_gateway[peer][gateway] == size, f"{seed=}"
        strays = [size for size in credits_.values() if size < STRAY_BYTES]
        assert 2 * (sum(credits_.values()) - sum(strays)) <= HELD_BYTES, f"{seed=}"


@pytest.mark.parametrize("seed", range(100))
def test_any_chunk_fits_where_no_credit_is_taken(seed: int) -> None:
    """Shards of few elements meet where those of many do not: what they share is small."""
    chance = random.Random(seed)
    counts = chance.randint(1, 6), chance.randint(1, 6)
    ranks = chance.randint(1, 9), chance.randint(1, 9)
    cut = grid(
        chance.choice((chance.randint(1, 200), chance.randint(1, 1 << 22))),
        CHUNK_BYTES // 4,
        (counts[0] * ranks[0], counts[1] * ranks[1]),
    )
    credits_ = [
        credit_of_peers(config_of(counts, (0, gateway), ranks)) for gateway in range(counts[0])
    ]
    for chunk in range(cut.num_chunks):
        own, other = (cut.owner(site, chunk) // ranks[site] for site in (0, 1))
        size_bytes = FRAME_OVERHEAD_BYTES + 4 * (cut.span(chunk)[1] + 4)
        assert size_bytes <= credits_[own][1, other], f"{seed=} {chunk=}"


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize(
    ("bandwidth", "rtt"), [("50Mbit/s", "10ms"), ("1Gbit/s", "150ms"), ("10Gbit/s", "80ms")]
)
def test_a_link_never_waits_for_results(nodes: int, bandwidth: str, rtt: str) -> None:
    """Of the links that documents describe, any has credit for two windows and more."""
    text = topology_text(8, ranks=8).replace("100Mbit/s", bandwidth).replace("10ms", rtt)
    described = load_topology(text.replace("nodes: 1", f"nodes: {nodes}"), "topology.yaml")
    job = Job(name="j", topology="topology.yaml", exchange=Exchange(codec="fp32"))
    config = gateway_config_of(
        spec_of(job, described),
        run_id="run-1",
        generation=1,
        config_hash="",
        site="a",
        gateway=nodes - 1,
        bind_host="127.0.0.1",
        socket_path="/nowhere",
    )
    found = credit_of_peers(config)
    for link in config.links:
        peer = config.sites.index(link.site), nodes - 1
        assert found[peer] >= 3 * link.bytes_per_s * link.rtt_s - 1
