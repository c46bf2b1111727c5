"""A resolved topology: sites and directed links, with all figures in base units.

Made from YAML by topology/documents/load.py; frozen. Rates are bytes per second, times are seconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from isthmus.topology.spec.addresses import Host, Jump
from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.units import BDP, SIZE, UnitError, parse_size
from isthmus.topology.spec.yaml_keys import (
    Bounds,
    Count,
    Duration,
    Key,
    KeyedError,
    Number,
    PositiveDuration,
    Rate,
    Read,
    Section,
    Share,
    Text,
    Word,
    choice,
    flag,
)

EMULATORS = ("auto", "relay", "netns")
"""The kinds of WAN emulation. `relay`: connections pass through user space, on any system. `netns`:
a network namespace a site, and packets of the kernel's own TCP between them. `auto`: netns where it
can be, else relay."""

SECURITY_MODES = ("insecure", "mtls")
"""How connections are protected."""
SCRIPT_ERRORS = ("end", "go_on")
"""Choices for a run whose script fails at one site."""
EARLY_ENDS = ("go_on", "end")
"""Choices for a run whose script ends at one site while others go on."""
LAUNCHERS = ("local", "ssh", "slurm")
CONGESTION = ("cubic", "reno", "bbr")
"""The congestion controls of TCP, by their names in the kernel."""
MAX_FLOWS = 32
"""Limit on competing flows on a link: two processes carry them all."""
_CLOCK = r"^([01][0-9]|2[0-3]):[0-5][0-9]$|^24:00$"


def _clock(value: object) -> int:
    if not isinstance(value, str) or re.fullmatch(_CLOCK, value) is None:
        raise ValueError(f"want a time of day as 08:00, got {shown(value)}")
    hours, minutes = value.split(":")
    return int(hours) * 60 + int(minutes)


CLOCK = Read(_clock, {"type": "string", "pattern": _CLOCK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Location(Section):
    """Where a site is, in degrees: gives distances, and so latencies."""

    lat: Annotated[Number, Bounds(ge=-90, le=90)]
    lon: Annotated[Number, Bounds(ge=-180, le=180)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator of a site."""

    name: str
    peak_flops_per_s: Mapping[str, float]
    """Peak FLOP/s by dtype: `bf16`, `fp32`, ..."""
    memory_bytes: int
    mfu: float
    """Model FLOPs utilisation that a step reaches, 0 to 1."""
    price_usd_per_h: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric(Section):
    """The network inside a site."""

    node_bytes_per_s: Annotated[Rate, Key("node")]
    """Between accelerators of one node."""
    cluster_bytes_per_s: Annotated[Rate, Key("cluster")]
    """Between nodes, a node."""
    latency_s: Annotated[Duration, Key("latency")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Section):
    """How `isthmus up` starts the site's agent. `launch` alone starts all on this machine."""

    kind: Annotated[str, choice(LAUNCHERS, later=("agent", "kubernetes"))] = "local"
    host: Host | None = None
    """ssh: the machine. slurm: where srun is; none: on this machine."""
    user: Word | None = None
    """Who logs in there."""
    port: Annotated[int, Bounds(ge=1, le=65535)] = 22
    """Of its sshd."""
    key: Word | None = None
    """File of the private key; none: the ssh agent, and ~/.ssh."""
    known_hosts: Word | None = None
    """File of the host keys; none: ~/.ssh/known_hosts."""
    jump: Jump | None = None
    """A machine on the way, as user@host:port; user and port may lack."""
    python: Word | None = None
    """Python there with isthmus. [python3; at a local site: this one]"""
    folder: Word | None = None
    """The agent's folder there. [~/.local/state/isthmus/up/TOPOLOGY/SITE; at a local site: below
    HOME]"""
    options: tuple[Text, ...] = ()
    """More arguments. slurm: of srun, as --partition=gpu; ":" separates the components of a
    heterogeneous job, each of which has its --nodes. ssh: of the ssh by which the first of
    `hosts` reaches the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRange:
    """Ports that a firewall lets through, both ends included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The listening addresses of a site's gateways, if they differ from the dialled ones."""

    told: str = ""
    """Host that others dial; empty: the bound one."""
    bind: str = ""
    """Host that gateways bind; empty: the site's address."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces whose addresses a node's gateways bind instead, in turn."""
    ports: PortRange | None = None
    """Ports to bind, one per gateway; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One data center."""

    name: str
    index: int
    """Position in the topology: the order in which contributions are summed."""
    nodes: int
    accelerators_per_node: int
    accelerator: Accelerator
    address: str
    """Host that peers dial, if known before gateways listen; empty if it follows from their
    `interfaces`."""
    inbound: bool = True
    """Whether its gateways can be dialled; otherwise they dial for both directions."""
    listening: Listening = field(default=Listening(), compare=False)
    """Listening addresses of its gateways, which do not affect a run."""
    proxy: str = field(default="", compare=False)
    """URL of the HTTP proxy between its agent and the coordinator; empty: there is none."""
    location: Location | None = None
    fabric: Fabric | None = None
    launcher: Launcher = field(default=Launcher(), compare=False)
    """Launcher of its agent, which does not affect a run."""
    hosts: tuple[str, ...] = field(default=(), compare=False)
    """Hosts of its nodes, the agent's first; empty: all on the agent's host, or chosen by Slurm.
    They do not affect a run."""
    nic_bytes_per_s: float | None = None
    """Bytes per second that each node can send towards the WAN; None: as much as its links
    carry."""
    gateways_per_node: int = 1
    """Gateways that divide the ranks of a node among them: a divisor of accelerators_per_node. 1
    while it has yet to be decided."""
    chooses_gateways: bool = field(default=False, compare=False)
    """Whether `gateways_per_node` has yet to be decided, for a run (topology/spec/lanes.py)."""
    job_folder: str = field(default="", compare=False)
    """Folder at the site that corresponds to the folder of the job file; empty: the same path, or
    what is carried there."""
    prologue: tuple[str, ...] = field(default=(), compare=False)
    """Lines of bash before the ranks of each of its machines."""

    @property
    def bound(self) -> str:
        """Host that its gateways bind; empty: unknown, or none."""
        if not self.inbound or self.listening.interfaces:
            return ""
        return self.listening.bind or self.address

    @property
    def num_ranks(self) -> int:
        """The number of ranks inside the site: one for each accelerator."""
        return self.nodes * self.accelerators_per_node

    @property
    def num_gateways(self) -> int:
        """The number of gateways of the site, all nodes together."""
        return self.nodes * self.gateways_per_node

    @property
    def ranks_per_gateway(self) -> int:
        """The number of ranks that each gateway serves."""
        return self.accelerators_per_node // self.gateways_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Period(Section):
    """A time of day (UTC) in which another share of a link may be used."""

    start_minute: Annotated[int, Key("from"), CLOCK]
    end_minute: Annotated[int, Key("to"), CLOCK]
    share: Share

    def check(self) -> None:
        """Refuse a period that takes no time."""
        if self.start_minute == self.end_minute:
            raise KeyedError("to", "want another time than from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two sites."""

    source: str
    target: str
    bytes_per_s: float
    """Bytes per second that a run may use, after the share; a measured figure overrides the
    described one."""
    rtt_s: float
    rtt_origin: str
    """The origin of the RTT: `measured`, `rtt`, `distance` or `locations`."""
    jitter_s: float = 0.0
    loss: float = 0.0
    egress_usd_per_byte: float = 0.0
    max_flows: int | None = None
    window_bytes: int | None = None
    congestion: str | None = None
    """The congestion control of the source's TCP, by its name in the kernel; None: BBR where
    gateways may choose it, else the host's."""
    distance_km: float | None = None
    """Kilometres as written, or between the sites' locations."""
    share: float = 1.0
    """Share of the link that a run may use; already applied to `bytes_per_s`."""
    schedule: tuple[Period, ...] = ()
    bandwidth_origin: str = "bandwidth"
    """The origin of the bandwidth: `measured`, or `bandwidth`: as described."""
    described_bytes_per_s: float | None = field(default=None, compare=False)
    """Bytes per second that the topology describes beside a measured figure, the share applied;
    else None. It changes no run."""
    described_rtt_s: float | None = field(default=None, compare=False)
    """Seconds of round trip that the topology describes beside a measured one; else None. It
    changes no run."""
    measured_at: str | None = None
    """The time when a probe measured it, in ISO 8601."""

    @property
    def assumed_congestion(self) -> str:
        """Congestion control assumed by predictions; if none is set, Linux's default."""
        return self.congestion or "cubic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A host and a port to listen on; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection(Section):
    """When something counts as failed."""

    detect_within_s: Annotated[PositiveDuration, Key("detect_within")] = 15.0
    """A dead process or a silent path is noticed within this."""
    start_within_s: Annotated[PositiveDuration, Key("start_within", default="120s")] = 120.0
    """Every site is up within this, or all are rolled back."""
    min_sites: Count = 1
    """The fewest sites that a run goes on with."""
    ride_out_s: Annotated[PositiveDuration, Key("ride_out")] = 600.0
    """An outage of this length is waited out where too few sites are left."""
    stall_within_s: Annotated[PositiveDuration | None, Key("stall_within")] = None
    """A rank that does not come while others wait is named after this; when absent, after the
    larger of detect_within and five steps."""
    coordinator_within_s: Annotated[PositiveDuration, Key("coordinator_within", default="1h")] = (
        3600.0
    )
    """Sites go on without a coordinator for this long."""
    max_restarts: Annotated[int, Bounds(ge=0, le=1000)] = 3
    """A site that is lost is started again so often within an hour."""
    return_share: Share = 0.5
    """Of each link's bandwidth, what the state may take that a site takes over when it comes
    back."""
    ends_on_script_error: Annotated[
        bool, Key("on_script_error"), flag(SCRIPT_ERRORS, true="end")
    ] = True
    """What becomes of a run whose script fails at one site: end, or go_on without that site, which
    then comes back as after an outage."""
    ends_on_early_end: Annotated[bool, Key("on_early_end"), flag(EARLY_ENDS, true="end")] = False
    """What becomes of a run where the script of one site ends while others go on: they go_on
    without that site, or it ends."""
    allows_losses: Annotated[bool, Key("allow_losses")] = False
    """A run that ends with fewer sites than it began with, or without its last checkpoint, has
    succeeded like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The size of a router's queue: one of the two figures, the other is 0."""

    num_bytes: int = 0
    bdp: float = 0.0
    """Size in bandwidth-delay products of the link."""

    def bytes_of(self, bytes_per_s: float, rtt_s: float) -> int:
        """Return the queue size of a link with those figures, at least one byte."""
        return max(1, self.num_bytes or round(self.bdp * bytes_per_s * rtt_s))


def parse_queue(value: object) -> Queue:
    """Parse a queue size such as `256KiB` or `0.5BDP`; UnitError for anything else, and for 0."""
    if isinstance(value, str) and value.endswith("BDP"):
        queue = Queue(bdp=BDP.number(value))
    else:
        try:
            queue = Queue(num_bytes=parse_size(value))
        except UnitError as error:
            raise UnitError(f"want 0.5BDP (bandwidth x round trip), or a size: {error}") from error
    if queue == Queue():
        raise UnitError(f"must be more than 0, got {shown(value)}")
    return queue


_QUEUE_SCHEMA = {
    "type": "string",
    "anyOf": [{"pattern": BDP.pattern}, {"pattern": SIZE.pattern}],
    "examples": ["0.5BDP", "256KiB"],
}
QUEUE = Read(parse_queue, _QUEUE_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTraffic(Section):
    """Bulk TCP flows of somebody else on an emulated WAN; netns only."""

    flows: Annotated[int, Bounds(ge=1, le=MAX_FLOWS)] = 1
    """On each directed link."""
    congestion: Annotated[str, choice(CONGESTION)] | None = None
    """What they follow; else what this host does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation(Section):
    """Conditions of an emulated WAN that its links do not describe."""

    described: Annotated[float, Bounds(gt=0, le=1000)] = 1.0
    """A run is told this many times the links' bandwidth."""
    queue: Annotated[Queue | None, QUEUE] = None
    """Of each directed link, in bytes, or in products of bandwidth and RTT."""
    congestion: Annotated[str, choice(CONGESTION)] | None = None
    """What TCP between sites follows (netns); else what this host does."""
    cross_traffic: CrossTraffic | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files; `{name}` in a path is the reading party: `coordinator`, `operator`, `eu.agent`."""

    ca: str = "certs/ca.pem"
    cert: str = "certs/{name}.pem"
    key: str = "certs/{name}.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sites, and the directed links between them."""

    name: str
    sites: tuple[Site, ...]
    links: tuple[Link, ...]
    failure: Detection
    coordinator: Endpoint
    emulate: bool = False
    """Whether launch puts an emulated WAN between the sites' gateways."""
    emulator: str = "auto"
    """The kind of emulation, one of EMULATORS."""
    emulation: Emulation = Emulation()
    """Conditions of the emulation. Links' `bytes_per_s` are those given to the run."""
    coordinator_told: Endpoint | None = field(default=None, compare=False)
    """Address at which the coordinator is dialled; None: where it listens."""
    coordinator_site: str | None = None
    """The site that hosts the coordinator, where one is named."""
    security: str = "insecure"
    """One of SECURITY_MODES. `insecure`: no TLS, and therefore only loopback addresses."""
    tls: Tls | None = field(default=None, compare=False)
    """Paths of certificates, with `mtls`; topologies that differ only here are equal."""
    _by_pair: Mapping[tuple[str, str], Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = {(link.source, link.target): link for link in self.links}
        object.__setattr__(self, "_by_pair", pairs)

    def site(self, name: str) -> Site:
        """Return the site of that name; KeyError if there is none."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(name)

    def link(self, source: str, target: str) -> Link | None:
        """Return the link from `source` to `target`, if there is a direct one."""
        return self._by_pair.get((source, target))

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all sites together."""
        return sum(site.num_ranks for site in self.sites)
