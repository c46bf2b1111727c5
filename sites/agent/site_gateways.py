"""A site's gateways, as its agent sees them.

The agent tells each gateway its configuration, hears what it says (docs/protocols.md), and passes
proposals of other plans on to all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.control.v1.control_pb2 import (
    DecideReduction,
    GatewayEndpoint,
    PrepareReduction,
    Reached,
    ReductionBegun,
    ReductionPrepared,
    Resume,
    Resumed,
    Settle,
    Settled,
    Suspect,
)
from protos.failure import Failure
from sites.agent.children import start_leashed
from sites.agent.site_failures import SiteError, describe_end
from sites.gateway.config import GatewayConfig, PeerLink, Proposal, StallLimits
from topology.channels import FLOWS_MAX
from topology.epoch import Epoch, Finished, finished_to_bytes, handovers_from_bytes, merged
from topology.errors import ConfigError
from topology.job import Probe
from topology.json_fields import read_json, to_json
from topology.run_spec import CodedPlan, RunSpec
from topology.world import Link, Topology

MODULE = "sites.gateway"
"""What runs as a gateway."""
MALLOC = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824"
    ":glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"
)
"""Buffers of megabytes come and go.

Without this each is an mmap and its page faults, half the throughput. One arena, for frames pass
from thread to thread: with an arena each, all keep what one frees. glibc reads it only when a
process starts.
"""
_EXIT_S = 2.0
"""Between the end of a gateway's output and that of its process."""
_PROBE_WINDOW_MIN_BYTES = 2 << 20
_PROBE_WINDOW_MAX_BYTES = 16 << 20
"""A connection may hold twice that much which was not yet read. With the kernel's own limits (6 MiB
by default) one connection never gets beyond it, and many together must not fill a machine's
memory."""

Tell = Callable[[Mapping[str, Any]], None]
"""Sends one line to all of the site's gateways."""
Put = Callable[[ReductionPrepared | ReductionBegun | Settled | Resumed], None]
"""Sends a message to the coordinator; run and generation are filled in on the way."""

log = logging.getLogger(__name__)


def gateway_config(
    spec: RunSpec,
    *,
    run_id: str,
    generation: int,
    config_hash: str,
    site: str,
    gateway: int,
    bind_host: str | None = None,
    told_host: str | None = None,
    socket_path: str,
) -> GatewayConfig:
    """Return what one gateway has to know of a run.

    `bind_host` and `told_host` win over what the topology says of its site.

    Raises:
        ConfigError: it is more than a gateway can do.
    """
    exchange, sites = spec.job.exchange, spec.topology.sites
    described = spec.topology.site(site)
    listening = described.listening
    interfaces = () if bind_host else listening.interfaces
    config = GatewayConfig(
        run_id=run_id,
        generation=generation,
        config_hash=config_hash,
        site=site,
        gateway=gateway,
        sites=spec.site_names,
        gateways_per_site=tuple(each.num_gateways for each in sites),
        ranks_per_gateway=tuple(each.ranks_per_gateway for each in sites),
        plan=spec.reduction.plan,
        codecs=spec.reduction.codecs,
        error_feedback=exchange.error_feedback,
        non_finite=exchange.non_finite,
        chunk_bytes=spec.chunk_bytes,
        channels_per_link=exchange.channels_per_link,
        window_bytes=exchange.window_bytes,
        pipeline_bytes=spec.pipeline_bytes,
        verify_every=spec.job.verify_every,
        bind_host="" if interfaces else bind_host or listening.bind or described.address,
        interface=interfaces[gateway % len(interfaces)] if interfaces else "",
        told_host=listening.told if told_host is None else told_host,
        ports=listening.ports,
        socket_path=socket_path,
        links=tuple(
            PeerLink(
                site=link.target,
                bytes_per_s=link.bytes_per_s,
                rtt_s=link.rtt_s,
                max_flows=link.max_flows or FLOWS_MAX,
                is_shared=link.share < 1,
                congestion=link.congestion or "",
            )
            for link in _links_of(spec, site)
        ),
        peer_lost_s=spec.timeouts.peer_lost_s,
        rank_wait_s=spec.timeouts.process_group_s,
        stall=StallLimits(
            least_s=spec.timeouts.stall_s,
            rounds=spec.timeouts.stall_steps,
            first_s=spec.timeouts.start_s,
        ),
        keepalive_time_s=spec.timeouts.keepalive_time_s,
        keepalive_timeout_s=spec.timeouts.keepalive_timeout_s,
    )
    if spec.job.probe is not None:
        return probing_config(config, spec.job.probe, spec.topology)
    return config


def probing_config(config: GatewayConfig, probe: Probe, topology: Topology) -> GatewayConfig:
    """Return a site's configuration for a probe: one gateway, and all links that lead both ways."""
    links = [
        PeerLink(site=link.target, bytes_per_s=link.bytes_per_s, rtt_s=link.rtt_s)
        for link in topology.links
        if link.source == config.site and topology.link(link.target, link.source) is not None
    ]
    held = max((int(link.bytes_per_s * link.rtt_s) for link in links), default=0)
    return dataclasses.replace(
        config,
        links=tuple(links),
        gateways_per_site=(1,) * len(config.sites),
        window_bytes=min(max(held, _PROBE_WINDOW_MIN_BYTES), _PROBE_WINDOW_MAX_BYTES),
        probe=probe,
    )


def _links_of(spec: RunSpec, site: str) -> list[Link]:
    """Return the links to all sites that could be neighbours: members and trees may change."""
    topology, names = spec.topology, spec.site_names
    links = [topology.link(site, other) for other in names if topology.link(other, site)]
    return [link for link in links if link is not None]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what a site's processes say."""

    on_metric: Callable[[Mapping[str, Any]], None]
    on_digest: Callable[[Mapping[str, Any]], None]
    on_plan: Callable[[Mapping[str, Any]], None]
    """What a gateway says of a switch of plans."""
    on_epoch: Callable[[Mapping[str, Any]], None]
    """What a gateway answers to a settle or a resume."""
    on_opinion: Callable[[Mapping[str, Any]], None]
    """What a gateway thinks of another site: that it is suspected, or reached again."""
    on_failed: Callable[[Failure], None]
    on_stalled: Callable[[int, Mapping[str, Any]], None]
    """What a gateway, by its number, says of ranks that do not move."""


class Gateway:
    """A running gateway. `read` tells of what it says; the events are set as it goes along."""

    def __init__(
        self,
        config: GatewayConfig,
        node: int,
        process: asyncio.subprocess.Process,
        log_path: Path,
    ) -> None:
        self.index = config.gateway
        """Its number at the site."""
        self.node = node
        self.log_path = log_path
        self.process = process
        self.endpoint: GatewayEndpoint | None = None
        self.listening = asyncio.Event()
        self.connected = asyncio.Event()
        self.joined = asyncio.Event()
        self.probed = asyncio.Event()
        self.closing = False
        self._site = config.site
        self._failed = False

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        node: int,
        log_path: Path,
        namespaces: tuple[str, str] | None = None,
    ) -> Gateway:
        """Start a gateway of a node, in namespaces if so asked, and tell it its configuration."""
        env = {**os.environ, "GLIBC_TUNABLES": MALLOC, "PYTHONUNBUFFERED": "1"}
        with log_path.open("ab") as log_file:
            process = await start_leashed(
                MODULE, [], env=env, log=log_file, talks=True, namespaces=namespaces
            )
        gateway = cls(config, node, process, log_path)
        gateway.tell({"op": "configure", **to_json(config)})
        return gateway

    def connect(self, peers: Sequence[GatewayEndpoint]) -> None:
        """Have it dial the other sites' gateways."""
        addresses = [
            {"site": peer.site, "gateway": peer.gateway, "host": peer.host, "port": peer.port}
            for peer in peers
        ]
        sites = sorted({peer.site for peer in peers})
        self.tell({"op": "connect", "peers": addresses, "sites": sites})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Write one line; a gateway that has ended is noticed by `read`."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Have it leave. Idempotent."""
        self.closing = True
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def read(self, listeners: Listeners) -> None:
        """Handle what the gateway says until it has ended.

        An end that nobody asked for is a failure, and so is a status other than 0.
        """
        on_failed = listeners.on_failed
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:  # longer than any line of the protocol
                on_failed(self._found("PROTOCOL_VIOLATION", "its gateway wrote too long a line"))
                break
            if not line:
                break
            try:
                self._handle(json.loads(line), listeners)
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                text = line[:200].decode(errors="replace").strip()
                log.warning("gateway %d said %r: %r", self.index, text, error)
                on_failed(self._found("INTERNAL", f"its gateway said {text!r}"))
        try:
            async with asyncio.timeout(None if self.closing else _EXIT_S):
                exit_code = await self.process.wait()
        except TimeoutError:
            on_failed(self._found("GATEWAY_EXITED", "its gateway closed its output"))
            return
        if not self._failed and (exit_code != 0 or not self.closing):
            on_failed(self._ended(exit_code))

    def _handle(self, message: Mapping[str, Any], listeners: Listeners) -> None:
        match message["op"]:
            case "metric":
                listeners.on_metric(message)
            case "digest":
                listeners.on_digest(message)
            case "plan_prepared" | "plan_begun":
                listeners.on_plan(message)
            case "settled" | "resumed":
                listeners.on_epoch(message)
            case "suspect" | "reached":
                listeners.on_opinion({**message, "gateway": self.index})
            case "stalled":
                listeners.on_stalled(self.index, message)
            case "listening":
                self.endpoint = GatewayEndpoint(
                    site=self._site, gateway=self.index, host=message["host"], port=message["port"]
                )
                self.listening.set()
            case "connected":
                self.connected.set()
            case "joined":
                self.joined.set()
            case "probed":
                self.probed.set()
            case "failed":
                self._failed = True
                listeners.on_failed(self._reported(Failure.from_json(message)))
            case other:
                raise ValueError(f"unknown op {other!r}")

    def _reported(self, failure: Failure) -> Failure:
        """Return what the gateway tells of, with where and when: now, and here unless it says."""
        return dataclasses.replace(
            failure,
            at_s=time.monotonic(),
            site=failure.site or self._site,
            node=self.node,
            gateway=self.index,
            log_path=str(self.log_path),
        )

    def _found(self, code: str, message: str) -> Failure:
        return self._reported(Failure(code=code, message=message))

    def _ended(self, exit_code: int) -> Failure:
        message = f"gateway {self.index} of site {self._site} {describe_end(exit_code)}"
        return self._reported(Failure(code="GATEWAY_EXITED", message=message, exit_code=exit_code))


class EpochChange:
    """Passes one run's changes of epochs on to the gateways of this site, and their answers back.

    Each chunk belongs to one gateway of the site: what they have finished adds up.
    """

    def __init__(self, num_gateways: int, tell: Tell, put: Put) -> None:
        """`tell` reaches all of the site's gateways, `put` the coordinator."""
        self._num_gateways = num_gateways
        self._tell, self._put = tell, put
        self.epoch = 0
        """The one that all gateways of the site use."""
        self._waits_for = ("", 0)
        """The op and the epoch of the answers that are collected."""
        self._answers: list[Mapping[str, Any]] = []

    def settle(self, message: Settle) -> None:
        """Have the gateways begin no new round, and stop chunks if so asked."""
        self._expect("settled", message.epoch)
        self._tell({"op": "settle", "epoch": message.epoch, "stops": message.stops})

    def cancel(self, epoch: int) -> None:
        """Have them go on as before."""
        self._waits_for = ("", 0)
        self._tell({"op": "cancel", "epoch": epoch})

    def resume(self, message: Resume) -> None:
        """Have them go on in a new epoch.

        Raises:
            SiteError: this build cannot read it.
        """
        try:
            epoch = Epoch.from_bytes(message.record)
            handovers = handovers_from_bytes(message.handovers or b"[]")
        except ConfigError as error:
            raise SiteError("PROTOCOL_VIOLATION", error.problems[0].message) from error
        self._expect("resumed", epoch.number)
        self._tell(
            {
                "op": "resume",
                "epoch": epoch.number,
                "from_round": epoch.from_round,
                "members": list(epoch.members),
                "plan": to_json(epoch.reduction.plan),
                "codecs": list(epoch.reduction.codecs),
                "handovers": to_json(handovers),
                "enters": list(message.enters),
            }
        )

    def answered(self, answer: Mapping[str, Any]) -> None:
        """A gateway answers; once all have, the site does."""
        if (answer["op"], answer["epoch"]) != self._waits_for:
            return
        self._answers.append(answer)
        if len(self._answers) < self._num_gateways:
            return
        epoch = answer["epoch"]
        round_ = max(int(each["round"]) for each in self._answers)
        if answer["op"] == "resumed":
            self.epoch = epoch
            self._put(Resumed(epoch=epoch, round=round_))
            return
        parts = [read_json(tuple[Finished, ...], each["finished"]) for each in self._answers]
        chain_round, chain = _chain([each["chains"] for each in self._answers])
        self._put(
            Settled(
                epoch=epoch,
                round=round_,
                finished=finished_to_bytes(merged(each for part in parts for each in part)),
                chain=chain,
                chain_round=chain_round,
            )
        )

    def _expect(self, op: str, epoch: int) -> None:
        self._waits_for, self._answers = (op, epoch), []


class Opinions:
    """What the gateways of this site think of other sites, as the one opinion of the site."""

    def __init__(self) -> None:
        self._by_site: dict[str, dict[int, Suspect]] = {}
        """Which gateways suspect a site, by its name."""

    def take(self, message: Mapping[str, Any]) -> Suspect | Reached | None:
        """Note a gateway's opinion; return the site's, if it has another now.

        A site is suspected while any gateway suspects it.
        """
        site, gateway = message["site"], message["gateway"]
        before = self._of(site)
        if message["op"] == "reached":
            self._by_site.get(site, {}).pop(gateway, None)
        else:
            suspect = Suspect(site=site, is_gone=message["is_gone"], why=message["why"])
            self._by_site.setdefault(site, {})[gateway] = suspect
        now = self._of(site)
        if (now is None) == (before is None) and (
            now is None or before is None or now.is_gone == before.is_gone
        ):
            return None
        return Reached(site=site) if now is None else now

    def suspects(self) -> list[Suspect]:
        """Return the sites that are suspected now."""
        found = (self._of(site) for site in self._by_site)
        return [each for each in found if each is not None]

    def _of(self, site: str) -> Suspect | None:
        opinions = list(self._by_site.get(site, {}).values())
        gone = [each for each in opinions if each.is_gone]
        return next(iter(gone or opinions), None)


def _chain(chains: Sequence[Mapping[str, int]]) -> tuple[int, int]:
    """Return the latest round that all gateways have completed, and their chains added up."""
    complete = set.intersection(*(set(map(int, each)) for each in chains))
    if not complete:
        return -1, 0
    latest = max(complete)
    return latest, sum(each[str(latest)] for each in chains) % (1 << 64)


class PlanSwitch:
    """Passes one run's proposals on to the gateways of this site, and their answers back."""

    def __init__(self, num_gateways: int, tell: Tell, put: Put) -> None:
        """`tell` reaches all of the site's gateways, `put` the coordinator."""
        self._num_gateways = num_gateways
        self._tell, self._put = tell, put
        self._epoch = 0
        self._answers: list[Mapping[str, Any]] = []
        self._begun_epoch = 0

    def prepare(self, message: PrepareReduction) -> None:
        """Ask the gateways whether they can use a plan; a mistake in it is the answer at once."""
        self._epoch, self._answers = message.epoch, []
        try:
            reduction = CodedPlan.from_bytes(message.reduction)
        except ConfigError as error:
            why = error.problems[0].message
            self._put(ReductionPrepared(epoch=message.epoch, round=-1, why=why))
            return
        proposal = Proposal(
            epoch=message.epoch,
            from_round=message.from_round,
            plan=reduction.plan,
            codecs=reduction.codecs,
        )
        self._tell({"op": "prepare_plan", **dataclasses.asdict(proposal)})

    def decide(self, message: DecideReduction) -> None:
        """Pass on what came of it."""
        self._tell({"op": "decide_plan", "epoch": message.epoch, "commit": message.commit})

    def prepared(self, answer: Mapping[str, Any]) -> None:
        """A gateway answers `prepare_plan`; once all have, the site does."""
        if answer["epoch"] != self._epoch:
            return
        self._answers.append(answer)
        if len(self._answers) < self._num_gateways:
            return
        refusals = [each for each in self._answers if not each["accepted"]]
        hashes = {str(each["hash"]) for each in self._answers}
        why = str(refusals[0]["why"]) if refusals else ""
        if not refusals and len(hashes) > 1:
            why = "its gateways understood different plans"
        self._put(
            ReductionPrepared(
                epoch=self._epoch,
                accepted=not why,
                plan_hash=min(hashes),
                round=max(int(each["round"]) for each in self._answers),
                late=bool(refusals) and all(each["late"] for each in refusals),
                why=why,
                codecs_fixed=any(each["codecs_fixed"] for each in refusals),
            )
        )

    def begun(self, message: Mapping[str, Any]) -> None:
        """A gateway has got to the first round of a plan.

        The first one of the site to say so counts.
        """
        if message["epoch"] > self._begun_epoch:
            self._begun_epoch = message["epoch"]
            self._put(ReductionBegun(epoch=message["epoch"], round=message["round"]))
