"""What lies between sites: TCP's settings for each link, routes, clocks, connections. Pure.

None of TCP's settings is looked at where the WAN is emulated: the emulator brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.orchestrator.doctor.machine_checks import Machine
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.units import format_duration, format_size
from isthmus.topology.spec.world import GATEWAY_PORTS, Link, PortRange, Topology
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
    yield Finding(
        severity=Severity.WARNING,
        kind=f"small-{verb}-buffer",
        site=machine.name,
        found=f"{verb} buffers end at {format_size(max_bytes)}, and the link from {link.source} to "
        f"{link.target} holds {format_size(held_bytes)}",
        why=verdict,
        cure=f"sudo sysctl -w net.ipv4.tcp_{setting} {least_bytes}'",
    )


def _round_up(num_bytes: float) -> int:
    """Return the next power of two, at least 4 MiB: one setting for links that are alike."""
    return 1 << max(22, math.ceil(math.log2(max(1.0, num_bytes))))


def _congestion(link: Link, machine: Machine) -> Iterator[Finding]:
    sender = machine.facts
    allowed = sender.tcp.congestion_allowed
    if allowed is None:
        return
    wanted = link.congestion or "bbr"
    if wanted not in allowed and (link.congestion is not None or link.loss > 0):
        yield Finding(
            severity=Severity.WARNING,
            kind=f"{wanted}-unavailable",
            site=machine.name,
            found=f"{sender.user} may choose {', '.join(allowed)} for TCP, not {wanted}",
            why=f"the link to {link.target} loses packets, which {sender.tcp.congestion} takes for "
            "congestion"
            if link.congestion is None
            else f"the topology says `congestion: {wanted}` for the link to {link.target}",
            cure=f"sudo modprobe tcp_{wanted} && sudo sysctl -w "
            f"net.ipv4.tcp_allowed_congestion_control='{' '.join((*allowed, wanted))}'",
        )
    follows = wanted if wanted in allowed else sender.tcp.congestion
    if sender.tcp.slow_start_after_idle and follows != "bbr":
        yield Finding(
            severity=Severity.WARNING,
            kind="slow-start-after-idle",
            site=machine.name,
            found=f"connections to {link.target} start slowly after each pause, with {follows}",
            why="there is a pause in every step, and then some round trips of "
            f"{format_duration(link.rtt_s)} with little on the way",
            cure="sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )


def route_findings(machine: Machine, topology: Topology) -> list[Finding]:
    """Return peers that no route leads to, and paths with small packets."""
    facts, found = machine.facts, []
    names = {site.address: site.name for site in topology.sites}
    for address, reason in (facts.unrouted or {}).items():
        found.append(
            Finding(
                severity=Severity.ERROR,
                kind="no-route",
                site=machine.name,
                found=f"no route leads to {address} of site {names.get(address)}: {reason}",
                why="its gateways cannot be dialled from here",
                cure=f"ip route get {address}",
            )
        )
    for address, mtu_bytes in (facts.mtus_bytes or {}).items():
        if mtu_bytes < MTU_LEAST_BYTES:
            found.append(
                Finding(
                    severity=Severity.WARNING,
                    kind="small-mtu",
                    site=machine.name,
                    found=f"packets to {address} of site {names.get(address)} have {mtu_bytes} "
                    "bytes at most",
                    why="headers and interrupts take a large part of what the link carries",
                    cure=f"ip route get {address}; sudo ip link set dev DEVICE mtu 1500",
                )
            )
    return found


def clock_findings(
    site: str, ahead_s: float, uncertain_s: float, *, has_certificates: bool
) -> list[Finding]:
    """Return whether a site's clock is off, as seen from here: at least by what is certain."""
    off_s = max(0.0, abs(ahead_s) - uncertain_s)
    if off_s < CLOCK_FAR_S:
        return []
    is_wrong = has_certificates and off_s >= CLOCK_WRONG_S
    direction = "ahead of" if ahead_s > 0 else "behind"
    return [
        Finding(
            severity=Severity.ERROR if is_wrong else Severity.WARNING,
            kind="clock-off",
            site=site,
            found=f"its clock is {format_duration(off_s)} {direction} this machine's",
            why="certificates count as expired, or as not valid yet"
            if is_wrong
            else "timelines, logs and events of sites do not line up",
            cure="sudo timedatectl set-ntp true; timedatectl timesync-status",
        )
    ]


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


def connection_findings(tried: Tried) -> list[Finding]:
    """Return whether one site's processes can reach another's."""
    if tried.error is None:
        return []
    if "came back" in tried.error:
        return [
            Finding(
                severity=Severity.ERROR,
                kind="large-packets-lost",
                site=tried.source,
                found=f"from {tried.source} to {tried.target}: {tried.error}",
                why="packets of full size are lost on the way, and ICMP does not say so",
                cure="sudo sysctl -w net.ipv4.tcp_mtu_probing=1, or "
                "sudo ip link set dev DEVICE mtu 1400",
            )
        ]
    chosen = "that the system chooses"
    if tried.ports is not None:
        chosen = f"of {tried.ports.first}-{tried.ports.last}"
    return [
        Finding(
            severity=Severity.ERROR,
            kind="unreachable",
            site=tried.source,
            found=f"from {tried.source} ({tried.source_address}) to {tried.target} "
            f"({tried.target_address}), port {tried.port}: {tried.error}",
            why=f"its gateways dial the other's, each on {GATEWAY_PORTS} ports {chosen}",
            cure=f"at {tried.target}: sudo iptables -I INPUT -p tcp -s {tried.source_address} "
            f"-d {tried.target_address} -j ACCEPT; at {tried.source}: "
            f"ip route get {tried.target_address} from {tried.source_address}",
        )
    ]
