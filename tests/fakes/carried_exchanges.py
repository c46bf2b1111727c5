"""The real executors of all gateways of several sites, joined by links whose steps chance draws.

A link has the real queue and window; what its streams carry arrives in order on each, in any order
on different ones, and acknowledgements come later still. Ranks post as trainers do: a bucket once
an earlier one's buffers are free, a round once all of the one before is back at their site. Who is
next is drawn from a seed, by how fast each is; somebody slow may not have a turn until all others
can do nothing.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from isthmus.protos.failure import Failure
from isthmus.protos.frame import Frame, Packed, pack, unpack
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.gateway.config import GatewayId
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.links.send_queue import Name, SendQueue, outgoing
from isthmus.sites.gateway.reduction.executor import Executor
from isthmus.sites.local.rank_messages import Reduced
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.exchanges import StepPool, request_of
from tests.fakes.gateway_sites import gateway_config

SPEEDS = (1.0, 1.0, 0.1, 1e-9)
"""How often somebody's turn comes; the last: when nobody else can do anything."""
_TRIES = 64
"""Turns in a row that come to nothing, before it is looked for somebody who can do something."""


@dataclass(frozen=True, slots=True)
class World:
    """What is drawn for one simulation."""

    plan: ReductionPlan
    codecs: tuple[str, ...]
    gateways_per_site: tuple[int, ...]
    ranks_per_gateway: tuple[int, ...]
    chunk_bytes: int
    held_bytes: int
    window_bytes: int
    ahead_bytes: int
    num_streams: int
    num_slots: int
    """Buckets of a site that are under way at once."""
    rounds: tuple[tuple[tuple[int, int, bool], ...], ...]
    """Of each round, the buckets: number, elements, whether exact."""
    breaks: float
    """How often a stream breaks, for each frame that it carries."""
    is_mesh: bool = False
    """Whether all sites have links with each other, and not only those that the plan needs."""
    error_feedback: bool = True


class CarriedLink:
    """Stands where a Link does."""

    rtt_s = 0.001
    bytes_per_s = 1e9

    def __init__(self, world: World, pump: Callable[[], None]) -> None:
        self.num_channels = world.num_streams
        self.ahead_bytes = world.ahead_bytes
        self.queue = SendQueue(world.window_bytes, 0.001)
        self.streams: list[deque[Packed]] = [deque() for _ in range(world.num_streams)]
        self.acks: list[deque[Name]] = [deque() for _ in range(world.num_streams)]
        self._pump = pump
        self._now_s = 0.0

    @property
    def unsent_bytes(self) -> int:
        return self.queue.unsent_bytes

    def send(self, frame: Frame, raw_bytes: int) -> int:
        data = pack(frame)
        self.queue.push(outgoing(frame.key, frame.epoch, data, raw_bytes))
        return len(data)

    def take(self, stream: int) -> bool:
        """Let the next frame leave; return whether one could."""
        self._now_s += 1.0
        item = self.queue.take(stream, self._now_s)
        if item is None:
            return False
        self.streams[stream].append(item.data)
        self._pump()
        return True

    def acknowledge(self, stream: int) -> bool:
        """Let the sender hear of a frame that was taken over; return whether there is one."""
        if not self.acks[stream]:
            return False
        self.queue.acknowledge(self.acks[stream].popleft(), self._now_s)
        return True

    def break_off(self, stream: int) -> None:
        """Lose a connection, and all on it both ways."""
        self.streams[stream].clear()
        self.acks[stream].clear()
        self.queue.requeue(stream, self._now_s)


class Rank:
    """Posts every bucket of every round, as soon as it may."""

    def __init__(self, carried: CarriedExchanges, site: int, rank: int) -> None:
        self.shards: list[Floats] = []
        self._carried, self._site, self._rank = carried, site, rank
        self._buckets = [
            (number, *bucket)
            for number, buckets in enumerate(carried.world.rounds)
            for bucket in buckets
        ]

    def post(self) -> bool:
        """Post the next bucket; return whether that may be now."""
        index = len(self.shards)
        if index == len(self._buckets):
            return False
        round_, bucket, numel, exact = self._buckets[index]
        gateway = self._rank // self._carried.world.ranks_per_gateway[self._site]
        exchange = self._carried.exchanges[self._site, gateway]
        if round_ > exchange.round and not exchange._epochs.may_begin(round_):
            return False
        first = next(at for at, each in enumerate(self._buckets) if each[0] == round_)
        if self._carried.num_back(self._site) < max(
            first, index + 1 - self._carried.world.num_slots
        ):
            return False
        values = self.part(index)
        self.shards.append(values)
        exchange.post(
            self._rank,
            request_of(numel, round=round_, bucket=bucket, weight=1.0 + self._site, exact=exact),
            values,
        )
        return True

    def part(self, index: int) -> Floats:
        """Return what the rank hands over of its bucket of that number."""
        world, numel = self._carried.world, self._buckets[index][2]
        ranks = world.gateways_per_site[self._site] * world.ranks_per_gateway[self._site]
        size = max(1, -(-numel // ranks))
        count = min(size, max(0, numel - self._rank * size))
        generator = np.random.default_rng((self._site, self._rank, index))
        return generator.standard_normal(count, dtype=np.float32)


class CarriedExchanges:
    """Everybody of one world. `run` it, then look at `failures` and `results`."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.failures: list[Failure] = []
        self.lost: set[int] = set()
        """Sites of which nothing runs any more."""
        self.most_held_bytes = 0
        self.num_arrived = 0
        """Frames that were taken over."""
        self._chance = chance
        self._reduced: dict[int, list[int]] = {site: [] for site in range(world.plan.num_sites)}
        """By site, how many ranks have each bucket back, in their order."""
        self._pools: dict[GatewayId, StepPool] = {}
        self.exchanges = {
            (site, gateway): self._exchange(site, gateway)
            for site in range(world.plan.num_sites)
            for gateway in range(world.gateways_per_site[site])
        }
        self.links: dict[tuple[GatewayId, GatewayId], CarriedLink] = {}
        for source, exchange in self.exchanges.items():
            links = {
                target: CarriedLink(world, exchange.pump)
                for target in self.exchanges
                if target[0] in world.plan.neighbours(source[0])
                or (world.is_mesh and target[0] != source[0])
            }
            self.links.update({(source, target): link for target, link in links.items()})
            exchange.connect(cast("Mapping[GatewayId, Link]", links))
        self.ranks = {
            (site, rank): Rank(self, site, rank)
            for site in range(world.plan.num_sites)
            for rank in range(world.gateways_per_site[site] * world.ranks_per_gateway[site])
        }

    def num_back(self, site: int) -> int:
        """Return how many buckets all ranks of a site have had back, from the first on."""
        ranks = self.world.gateways_per_site[site] * self.world.ranks_per_gateway[site]
        return sum(
            1 for _ in itertools.takewhile(lambda count: count == ranks, self._reduced[site])
        )

    @property
    def is_done(self) -> bool:
        """Whether every bucket is back everywhere."""
        total = sum(map(len, self.world.rounds))
        return all(self.num_back(site) == total for site in set(self._reduced) - self.lost)

    def results(self, site: int) -> list[bytes]:
        """Return what each bucket has become at a site."""
        shards = [each.shards for (at, _), each in self.ranks.items() if at == site]
        return [b"".join(part.tobytes() for part in parts) for parts in zip(*shards, strict=True)]

    def run(self) -> None:
        """Take turns until nobody can do anything."""
        turns, speeds = self._turns()
        totals = list(itertools.accumulate(speeds))
        num_idle = 0
        while not self.failures:
            if num_idle < _TRIES:
                [turn] = self._chance.choices(turns, cum_weights=totals)
                num_idle = 0 if turn() else num_idle + 1
                continue
            num_idle = 0
            if not any(turn() for turn in self._chance.sample(turns, len(turns))):
                return

    def _turns(self) -> tuple[list[Callable[[], bool]], list[float]]:
        """Return what may happen, and how often each does."""
        chance, turns, speeds = self._chance, list[Callable[[], bool]](), list[float]()

        def add(turn: Callable[[], bool], speed: float, site: int) -> None:
            turns.append(lambda: site not in self.lost and turn())
            speeds.append(speed)

        for (site, _), rank in self.ranks.items():
            add(rank.post, chance.choice(SPEEDS), site)
        for (site, _), pool in self._pools.items():
            add(pool.run_one, 4 * chance.choice(SPEEDS), site)
        for (source, target), link in self.links.items():
            speed = chance.choice(SPEEDS)
            for stream in range(self.world.num_streams):
                site = source[0]
                add(lambda link=link, stream=stream: link.take(stream), speed, site)  # type: ignore[misc]
                arrival = self._arrival(source, target, stream)
                add(arrival, speed * chance.choice(SPEEDS), target[0])
                add(lambda link=link, stream=stream: link.acknowledge(stream), speed, site)  # type: ignore[misc]
        return turns, speeds

    def _arrival(self, source: GatewayId, target: GatewayId, stream: int) -> Callable[[], bool]:
        link, exchange = self.links[source, target], self.exchanges[target]

        def arrive() -> bool:
            if not link.streams[stream]:
                return False
            frame = unpack(link.streams[stream].popleft())
            exchange.receive(source, frame)
            self.num_arrived += 1
            link.acks[stream].append((frame.key, frame.epoch))
            self.most_held_bytes = max(self.most_held_bytes, exchange.held_bytes)
            if self._chance.random() < self.world.breaks:
                link.break_off(stream)
            return True

        return arrive

    def _exchange(self, site: int, gateway: int) -> Executor:
        world = self.world
        config = gateway_config(
            Path("/nowhere"),
            world.plan,
            site,
            gateway,
            codecs=world.codecs,
            gateways_per_site=world.gateways_per_site,
            ranks_per_gateway=world.ranks_per_gateway,
            chunk_bytes=world.chunk_bytes,
            held_bytes=world.held_bytes,
            error_feedback=world.error_feedback,
        )

        def on_reduced(_: int, reduced: Reduced) -> None:
            buckets = [
                (number, bucket)
                for number, each in enumerate(world.rounds)
                for bucket, _, _ in each
            ]
            counts = self._reduced[site]
            counts.extend([0] * (len(buckets) - len(counts)))
            counts[buckets.index((reduced.round, reduced.bucket))] += 1

        pool = self._pools[site, gateway] = StepPool()
        return Executor(config, pool, on_reduced=on_reduced, on_failure=self.failures.append)
