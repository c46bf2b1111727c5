"""What lies between sites: TCP's settings for each link, routes, clocks, connections. Pure.

None of TCP's settings is looked at where the WAN is emulated: the emulator brings its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.orchestrator.doctor.findings import Finding
from isthmus.orchestrator.doctor.kinds import finding
from isthmus.orchestrator.doctor.machine_checks import Machine
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.units import format_duration, format_size
from isthmus.topology.spec.world import Link, PortRange, Topology
from isthmus.topology.trees.channels import FLOWS_MAX

SEND_SHARE = 0.75
"""Share of a send buffer's limit that is payload; the rest is the kernel's bookkeeping."""
RECEIVE_SHARE = 0.5
"""Share of a receive buffer's limit that Linux offers as a window (tcp_adv_win_scale)."""
CONNECTIONS = 8
"""More of them to fill one link is worth a word: each starts, and recovers, by itself."""
MTU_LEAST_BYTES = 1280
"""What IPv6 asks of each network. Below, headers take more than a twentieth."""
CLOCK_FAR_S = 1.0
CLOCK_WRONG_S = 300.0
"""Certificates that were just made are not valid yet where a clock is so far behind."""


def tcp_findings(
    machines: Mapping[str, Machine], topology: Topology, job: Job | None
) -> list[Finding]:
    """Return what TCP's settings at examined sites (by name) do to the links of a real WAN.

    Of each kind one for each machine: for the link that holds most.
    """
    found: dict[tuple[str, str | None], Finding] = {}
    wanted = None if job is None else job.exchange.channels_per_link
    for link in sorted(topology.links, key=lambda each: each.bytes_per_s * each.rtt_s):
        most = wanted or link.max_flows or FLOWS_MAX
        findings: list[Finding] = []
        if link.source in machines:
            sender = machines[link.source]
            findings += _buffer(link, most, sender, is_sending=True)
            findings += _congestion(link, sender)
            findings += _kernel_tls(sender) if topology.security.tls_files else ()
        if link.target in machines:
            findings += _buffer(link, most, machines[link.target], is_sending=False)
        found |= {(each.kind, each.site): each for each in findings}
    return list(found.values())


def _buffer(link: Link, most: int, machine: Machine, *, is_sending: bool) -> Iterator[Finding]:
    tcp = machine.facts.tcp
    max_bytes = tcp.send_max_bytes if is_sending else tcp.receive_max_bytes
    if max_bytes is None:
        return
    share, verb = (SEND_SHARE, "send") if is_sending else (RECEIVE_SHARE, "receive")
    held_bytes = link.bytes_per_s * link.rtt_s
    needed = math.ceil(held_bytes / max(1.0, share * max_bytes))
    if needed <= min(most, CONNECTIONS):
        return
    least_bytes = _round_up(held_bytes / share / min(most, 2))
    setting = "wmem='4096 16384" if is_sending else "rmem='4096 131072"
    verdict = (
        f"{most} connections carry {most / needed:.0%} of it"
        if needed > most
        else f"it takes {needed} connections to fill it"
    )
    yield finding(
        "small-{verb}-buffer",
        machine.name,
        verb=verb,
        most=format_size(max_bytes),
        source=link.source,
        target=link.target,
        held=format_size(held_bytes),
        verdict=verdict,
        setting=setting,
        least_bytes=least_bytes,
    )


def _round_up(num_bytes: float) -> int:
    """Return the next power of two, at least 4 MiB: one setting for links that are alike."""
    return 1 << max(22, math.ceil(math.log2(max(1.0, num_bytes))))


def _congestion(link: Link, machine: Machine) -> Iterator[Finding]:
    sender = machine.facts
    allowed = sender.tcp.congestion_allowed
    if allowed is None:
        return
    wanted, used = link.congestion or "bbr", sender.tcp.congestion
    if wanted not in allowed and (link.congestion is not None or link.loss > 0):
        why = f"the topology says `congestion: {wanted}` for the link to {link.target}"
        if link.congestion is None:
            why = f"the link to {link.target} loses packets, which {used} takes for congestion"
        yield finding(
            "{wanted}-unavailable",
            machine.name,
            user=sender.user,
            allowed=", ".join(allowed),
            wanted=wanted,
            why=why,
            raised=" ".join((*allowed, wanted)),
        )
    used = wanted if wanted in allowed else used
    if sender.tcp.slow_start_after_idle and used != "bbr":
        rtt = format_duration(link.rtt_s)
        yield finding("slow-start-after-idle", machine.name, target=link.target, used=used, rtt=rtt)


def _kernel_tls(machine: Machine) -> Iterator[Finding]:
    lacks = machine.facts.tcp.lacks_kernel_tls
    if lacks is not None:
        yield finding("no-kernel-tls", machine.name, lacks=lacks)


def route_findings(machine: Machine, topology: Topology) -> Iterator[Finding]:
    """Yield peers that no route leads to, and paths with small packets."""
    facts, names = machine.facts, {site.dialled: site.name for site in topology.sites}
    for address, reason in (facts.unrouted or {}).items():
        named = names.get(address)
        yield finding("no-route", machine.name, address=address, named=named, reason=reason)
    for address, mtu_bytes in (facts.mtus_bytes or {}).items():
        if mtu_bytes < MTU_LEAST_BYTES:
            to = {"address": address, "named": names.get(address)}
            yield finding("small-mtu", machine.name, mtu_bytes=mtu_bytes, **to)


def clock_findings(
    site: str, ahead_s: float, uncertain_s: float, *, has_certificates: bool
) -> Iterator[Finding]:
    """Yield whether a site's clock is off, as seen from here: at least by what is certain."""
    off_s = max(0.0, abs(ahead_s) - uncertain_s)
    if off_s < CLOCK_FAR_S:
        return
    is_wrong = has_certificates and off_s >= CLOCK_WRONG_S
    yield finding(
        "clock-off/certificates" if is_wrong else "clock-off",
        site,
        off=format_duration(off_s),
        direction="ahead of" if ahead_s > 0 else "behind",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A connection from one site to another that was tried."""

    source: str
    target: str
    source_address: str
    target_address: str
    port: int
    error: str | None
    """The reason why it does not work; None: it does."""
    ports: PortRange | None = None
    """Those that the target's gateways bind; None: the system chooses."""


def connection_findings(tried: Tried) -> Iterator[Finding]:
    """Yield whether one site's processes can reach another's."""
    if tried.error is None:
        return
    facts = dataclasses.asdict(tried)
    if "came back" in tried.error:
        yield finding("large-packets-lost", tried.source, **facts)
        return
    facts["chosen"] = "that the system chooses"
    if tried.ports is not None:
        facts["chosen"] = f"of {tried.ports.first}-{tried.ports.last}"
    yield finding("unreachable", tried.source, **facts)
