"""Two gateways that ship, each with a stand-in for its one rank: what their measurements run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.protos.errors import IsthmusError
from isthmus.protos.own_processes import leashed, own_command
from isthmus.sites.gateway.config import HELD_BYTES, GatewayConfig, PeerLink
from isthmus.sites.local.rank_messages import Reduce, Reduced, Region
from isthmus.sites.local.regions import create_region
from isthmus.sites.node.gateway_process import MALLOC
from isthmus.sites.worker.exchange.gateway_link import GatewayLink
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.reduction_plan import ReductionPlan

SITES = ("a", "b")
DEADLINE_S = 120.0
PAYLOAD_SHARE = 0.965


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the gateways, the link between them and a round are like."""

    bits_per_s: float
    rtt_s: float
    loss: float
    congestion: str
    codec: str
    channels: int | None
    max_flows: int
    chunk_bytes: int
    window_bytes: int | None
    keeps_warm: bool
    """No slow start after idle."""
    num_buckets: int
    num_bytes: int
    """float32 of a round, all buckets together."""
    held_bytes: int = HELD_BYTES

    @property
    def bound_s(self) -> float:
        """What no exchange can be faster than."""
        return self.num_bytes * 8 / (PAYLOAD_SHARE * self.bits_per_s) + self.rtt_s / 2


class GatewayChild:
    """One gateway's process, told and heard as by an agent."""

    def __init__(self, config: GatewayConfig, where: SiteNamespace | None, log: IO[bytes]) -> None:
        namespaces = None if where is None else (where.user, where.net)
        self.process = subprocess.Popen(
            leashed(own_command("isthmus.sites.gateway"), namespaces),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "GLIBC_TUNABLES": MALLOC},
        )
        self._lines: list[dict[str, object]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell({"op": "configure", **to_json(config)})

    def tell(self, message: dict[str, object]) -> None:
        """Write one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, op: str) -> dict[str, object]:
        """Return the first line of a kind."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(op) or self._find("failed"), DEADLINE_S)
        found = self._find(op)
        if found is None:
            raise SystemExit(f"no {op}: {self._find('failed') or self._lines[-3:]}")
        return found

    def latest(self, kind: str) -> dict[str, object]:
        """Return the latest metric of a kind; empty before the first."""
        with self._changed:
            found = [line for line in self._lines if line.get("kind") == kind]
        return found[-1] if found else {}

    def end(self) -> None:
        """Have it leave; kill it if it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self._reader.join(DEADLINE_S)
            self.process.stdout.close()

    def _find(self, op: str) -> dict[str, object] | None:
        return next((line for line in self._lines if line["op"] == op), None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(json.loads(line))
                self._changed.notify_all()


class RankStandIn:
    """The one rank of a site: posts its buckets, and notes when each comes back."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self._numel = setting.num_bytes // 4 // setting.num_buckets
        self._buckets = range(setting.num_buckets)
        self._link = GatewayLink(path, DEADLINE_S)
        self._link.join(rank=0, local_rank=0, generation=1, timeout_s=DEADLINE_S)
        self._remaining = threading.Semaphore(0)
        self._error: IsthmusError | None = None
        self.regions = []
        for bucket in self._buckets:
            values, descriptor = create_region(self._numel)
            self._link.send(Region(region=bucket, numel=self._numel), descriptor)
            os.close(descriptor)
            self.regions.append(values)
        self._link.start(self._reduced, self._failed)

    def round(self, number: int) -> tuple[float, float]:
        """Reduce all buckets; return when the first was posted and when the last came back."""
        began_s = self.post(number)
        ended_s = self.wait(number)
        assert all((abs(values - 1.0) < 0.02).all() for values in self.regions)  # codecs round
        return began_s, ended_s

    def post(self, number: int) -> float:
        """Hand all buckets over; return when the first was."""
        for values in self.regions:
            values.fill(1.0)
        began_s = time.perf_counter()
        for bucket in self._buckets:
            self._link.send(
                Reduce(
                    round=number,
                    bucket=bucket,
                    region=bucket,
                    numel=self._numel,
                    layout=7,
                    weight=1.0,
                    exact=False,
                )
            )
        return began_s

    def wait(self, number: int) -> float:
        """Wait until all have come back; return when."""
        for _ in self._buckets:
            if not self._remaining.acquire(timeout=DEADLINE_S) or self._error is not None:
                raise SystemExit(f"round {number} did not end: {self._error}")
        return time.perf_counter()

    def leave(self) -> None:
        """End cleanly."""
        self._link.leave()

    def _reduced(self, _: Reduced) -> None:
        self._remaining.release()

    def _failed(self, error: IsthmusError) -> None:
        self._error = error
        self._remaining.release(len(self._buckets))


def config_of(setting: Setting, site: int, host: str, folder: Path) -> GatewayConfig:
    """Return one gateway's configuration."""
    other = SITES[1 - site]
    return GatewayConfig(
        run_id="bench",
        generation=1,
        config_hash="0" * 64,
        site=SITES[site],
        gateway=0,
        sites=SITES,
        gateways_per_site=(1, 1),
        ranks_per_gateway=(1, 1),
        plan=ReductionPlan(2, (), "two sites"),
        codecs=(setting.codec,),
        error_feedback=True,
        chunk_bytes=setting.chunk_bytes,
        channels_per_link=setting.channels,
        window_bytes=setting.window_bytes,
        held_bytes=setting.held_bytes,
        pipeline_bytes=int(3 * setting.bits_per_s / 8 * setting.rtt_s),
        verify_every=0,
        bind_host=host,
        socket_path=str(folder / f"{SITES[site]}.sock"),
        links=(
            PeerLink(
                site=other,
                bytes_per_s=setting.bits_per_s / 8,
                rtt_s=setting.rtt_s,
                max_flows=setting.max_flows,
            ),
        ),
        peer_lost_s=30.0,
        rank_wait_s=300.0,
        keepalive_time_s=10.0,
        keepalive_timeout_s=10.0,
    )


@contextlib.contextmanager
def pair(
    setting: Setting, places: list[SiteNamespace | None]
) -> Iterator[tuple[list[GatewayChild], list[RankStandIn]]]:
    """Run two gateways, connected, with a rank each."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children: list[GatewayChild] = []
        hosts = ["127.0.0.1" if place is None else place.address for place in places]
        for site, place in enumerate(places):
            log = stack.enter_context((folder / f"{SITES[site]}.log").open("w+b"))
            stack.callback(_show_warnings, folder / f"{SITES[site]}.log")
            child = GatewayChild(config_of(setting, site, hosts[site], folder), place, log)
            stack.callback(child.end)
            children.append(child)
        for site, child in enumerate(children):
            other = 1 - site
            port = children[other].wait("listening")["port"]
            peer = {"site": SITES[other], "gateway": 0, "host": hosts[other], "port": port}
            child.tell({"op": "connect", "peers": [peer]})
        for child in children:
            child.wait("connected")
        ranks = []
        for site in range(2):
            rank = RankStandIn(folder / f"{SITES[site]}.sock", setting)
            stack.callback(rank.leave)
            ranks.append(rank)
        yield children, ranks


def _show_warnings(log: Path) -> None:
    for line in log.read_text().splitlines():
        if " WARNING " in line or " ERROR " in line or "hint" in line:
            print(f"    {line[:200]}", file=sys.stderr)
