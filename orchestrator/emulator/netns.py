"""The packet emulator: carries packets from site to site through TUN devices.

`python -m isthmus.orchestrator.emulator.netns` reads one line of JSON (emulator_config.py) from
stdin, makes a network namespace for each site, prints how to enter them, then the counters once a
second. Further lines of stdin change links. It ends when stdin does, so with its parent too, and
the namespaces end with it. Exit status 2 and one line on stderr: the configuration is wrong, or
this machine does not allow it.

One thread and one loop carry the packets. In a turn it reads at most `FRAMES_PER_TURN` of a device
before it looks at what is due, so no site can keep another waiting. There is one turn each
`TURN_S`, on average, because a turn is a wake-up that takes a core from a site's processes. Where
twelve busy links share two cores, a turn for every packet costs the sites a seventh of their speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.emulator_config import (
    NETNS_KINDS,
    Counted,
    NetnsConfig,
    Up,
    check_changes,
)
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.emulator.owner_pipes import (
    Conversation,
    LineReader,
    be_punctual,
    run_emulator,
)
from isthmus.orchestrator.emulator.packet_link import MAX_FRAME_BYTES, PacketLink, parse
from isthmus.orchestrator.emulator.site_namespaces import (
    NetnsError,
    address_of,
    enter_new_network,
    open_site,
    own_user_namespace,
)
from isthmus.protos.own_processes import leashed, own_command
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.world import CrossTraffic

FRAMES_PER_TURN = 64
TURN_S = 0.00025
"""Mean interval between turns.

While links are busy, a packet may leave or reach a site this much later.
"""
_TURNS_SAVED = 8
"""Turns that may run without a pause after a quiet moment.

So a request and its answer are handled at once.
"""


class Site:
    """A site's non-blocking TUN device, owned by the caller."""

    def __init__(self, name: str, address: str, device: int) -> None:
        self.name = name
        self.device = device
        (self.target,) = struct.unpack("!I", socket.inet_aton(address))
        self.links: dict[int, Route] = {}


class Route:
    """A directed link, with the device at its end."""

    def __init__(self, shape: LinkShape, seed: int, device: int) -> None:
        self.configured = shape
        self.shape = shape
        self.link = PacketLink(shape, seed)
        self.device = device
        self.is_scheduled = False


class Router:
    """Carries packets between sites. The caller owns the sites' devices."""

    def __init__(self, sites: Sequence[Site], links: Sequence[LinkShape], seed: int) -> None:
        by_name = {site.name: site for site in sites}
        self._sites = {site.device: site for site in sites}
        self._routes: dict[tuple[str, str], Route] = {}
        for shape in links:
            target = by_name[shape.target]
            route = Route(shape, seed, target.device)
            by_name[shape.source].links[target.target] = route
            self._routes[shape.source, shape.target] = route
        # Heap of routes with packets, by the time of their next delivery; one entry each.
        self._due: list[tuple[float, int, Route]] = []
        self._num_scheduled = 0

    def run(self, until_s: float, wake: int) -> bool:
        """Carry packets until `until_s`, on the monotonic clock, or until `wake` can be read.

        Returns:
            Whether `wake` can be read.

        Raises:
            OSError: a device is gone.
        """
        descriptors = [wake, *self._sites]
        turn_s = 0.0
        while (now_s := time.monotonic()) < until_s:
            turn_s = max(turn_s, now_s - _TURNS_SAVED * TURN_S) + TURN_S
            time.sleep(max(0.0, turn_s - now_s))
            next_s = min(until_s, self._due[0][0]) if self._due else until_s
            wait_s = max(0.0, next_s - time.monotonic())
            readable, _, _ = select.select(descriptors, [], [], wait_s)
            for descriptor in readable:
                if descriptor != wake:
                    self._collect(self._sites[descriptor])
            self._deliver()
            if wake in readable:
                return True
        return False

    def apply(self, changes: Sequence[Change]) -> None:
        """Make all changes at the same instant; ConfigError, and no change, if one is invalid."""
        check_changes(changes, self._routes, NETNS_KINDS)
        now_s = time.monotonic()
        for change in changes:
            _change(self._routes[change.source, change.target], change, now_s)
        # A link that became faster or shorter delivers earlier than scheduled.
        self._due = []
        for route in self._routes.values():
            route.is_scheduled = False
            self._schedule(route)

    def counters(self) -> Counted:
        """Return totals since the start, and current queues."""
        now_s = time.monotonic()
        links = []
        for (source, target), route in self._routes.items():
            queued_bytes = route.link.queued_bytes(now_s)  # brings the counters up to date
            passed = dataclasses.asdict(route.link.counters)
            links.append(
                {"source": source, "target": target, **passed, "queued_bytes": queued_bytes}
            )
        return Counted(links=tuple(links))

    def _collect(self, site: Site) -> None:
        """Read the packets that a site has sent."""
        device, links = site.device, site.links
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = os.read(device, MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            packet = parse(frame)
            # Drop packets without a link: broadcasts, and other networks.
            route = links.get(packet.target) if packet is not None else None
            if packet is not None and route is not None:
                route.link.offer(packet, time.monotonic())
                self._schedule(route)

    def _deliver(self) -> None:
        """Deliver all packets that have arrived by now."""
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, route = heapq.heappop(self._due)
            route.is_scheduled = False
            for part in route.link.delivered(now_s):
                # A site that has taken its device down loses what arrives, as it would for real.
                with contextlib.suppress(OSError):
                    os.writev(route.device, part)
            self._schedule(route)

    def _schedule(self, route: Route) -> None:
        """Schedule the next delivery of a route."""
        if route.is_scheduled:
            return
        due_s = route.link.due_s()
        if due_s < float("inf"):
            route.is_scheduled = True
            self._num_scheduled += 1  # a tie-break: routes cannot be compared
            heapq.heappush(self._due, (due_s, self._num_scheduled, route))


def _change(route: Route, change: Change, now_s: float) -> None:
    match change.kind:
        case "shape":
            route.shape = route.shape.changed(change.figures())
            route.link.reshape(route.shape, now_s)
        case "cut":
            route.link.cut(now_s)
        case "heal":
            route.shape = route.configured
            route.link.mend()
            route.link.reshape(route.shape, now_s)


def main() -> int:
    """Run the emulator until stdin ends; return the exit status."""
    try:
        return run_emulator("netns", NetnsConfig, _serve)
    except NetnsError as error:
        sys.stderr.write(f"netns: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"netns: a site's device is gone: {error.strerror}\n")
        return 1


def _serve(config: NetnsConfig, stdin: LineReader) -> None:
    with contextlib.ExitStack() as stack:
        sites, ready = _make_sites(config, stack)
        be_punctual()
        gc.disable()  # there are no reference cycles, and collections are pauses
        router = Router(sites, config.links, config.seed)
        owner = Conversation(stdin, sys.stdout.fileno(), router.apply, router.counters)
        owner.begin(Up(sites=ready), time.monotonic())
        while not stdin.has_ended:
            if router.run(owner.turn(time.monotonic()), stdin.descriptor):
                stdin.read()
        owner.end()


def _make_sites(
    config: NetnsConfig, stack: contextlib.ExitStack
) -> tuple[list[Site], tuple[SiteNamespace, ...]]:
    """Return the sites, and how each is entered; `stack` closes their resources.

    Call before `be_punctual`, so that cross traffic has normal priority.
    """
    own = f"/proc/{os.getpid()}"
    user = f"{own}/ns/user" if own_user_namespace() else ""
    sites, namespaces = [], []
    for index, name in enumerate(config.sites):
        namespace = enter_new_network()
        stack.callback(os.close, namespace)
        device = open_site(index, config.congestion)
        stack.callback(os.close, device)
        if config.cross_traffic is not None:
            stack.enter_context(_cross_traffic(config, config.cross_traffic, name))
        address = address_of(index)
        sites.append(Site(name, address, device))
        net = f"{own}/fd/{namespace}"
        namespaces.append(SiteNamespace(site=name, address=address, net=net, user=user))
    return sites, tuple(namespaces)


@contextlib.contextmanager
def _cross_traffic(config: NetnsConfig, traffic: CrossTraffic, site: str) -> Iterator[None]:
    """Run the cross traffic of the site in whose namespace this thread is."""
    addresses = {name: address_of(index) for index, name in enumerate(config.sites)}
    to = [addresses[link.target] for link in config.links if link.source == site]
    senders = [addresses[link.source] for link in config.links if link.target == site]
    folder = Path(config.cross_traffic_folder)
    folder.mkdir(parents=True, exist_ok=True)
    command = own_command(
        "isthmus.sites.bench.cross_traffic",
        *("--address", addresses[site], "--flows", str(traffic.flows)),
        *("--to", *to, "--from", *senders, "--congestion", traffic.congestion or ""),
        *("--out", str(folder / f"{site}.jsonl")),
    )
    process = subprocess.Popen(
        leashed(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
