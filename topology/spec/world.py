"""A topology: sites and directed links, with all figures in base units, and how a user writes them.

topology/documents/resolve.py gives sites what they have from others (`like`), and links their
measured figures; each class has the same fields before and afterwards. Rates are bytes per second,
times are seconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, ClassVar, Self

from isthmus.topology.spec.addresses import HOST, Host, Jump
from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.units import BDP, SIZE, UnitError, parse_size
from isthmus.topology.spec.yaml_keys import (
    Bounds,
    Checked,
    Compute,
    Count,
    Derived,
    Distance,
    Duration,
    Key,
    KeyedError,
    Loss,
    Name,
    Number,
    PositiveDuration,
    PricePerByte,
    PricePerHour,
    Rate,
    Read,
    Section,
    Share,
    Size,
    Text,
    Unwritten,
    Word,
    WrittenAs,
    choice,
    flag,
    number_or,
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
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
MAX_FLOWS = 32
"""Limit on competing flows on a link: two processes carry them all."""
MAX_SITES = 64
MAX_RANKS_PER_NODE = 128
PROLOGUE_MAX = 100
"""Limit on the lines before a site's ranks."""
LOOPBACK = "127.0.0.1"
AUTO = "auto"
MFU = 0.4
"""Default MFU: the share of an accelerator's peak that a large model's training step reaches.

Reported: 38 to 43 % for Llama 3 405B on 8,192 to 16,384 H100s (arXiv 2407.21783, table 4), 41 to
42 % for Nemotron-4 340B on 6,144 H100s (arXiv 2406.11704), 46 % for PaLM 540B on 6,144 TPU v4s
(arXiv 2204.02311).
"""
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
class Accelerator(Section):
    """What computes in a site."""

    name: Annotated[str, Unwritten] = ""
    peak_flops_per_s: Annotated[
        Mapping[Annotated[str, choice(DTYPES)], Compute],
        Key("peak", is_required=True),
        Bounds(min_length=1),
    ] = field(default_factory=dict)
    """By dtype."""
    memory_bytes: Annotated[Size, Key("memory", is_required=True)] = 0
    mfu: Share = MFU
    """Model FLOPs utilisation that a step reaches."""
    price_usd_per_h: Annotated[PricePerHour | None, Key("price")] = None

    @classmethod
    def named(cls, name: str) -> Self:
        """Return an accelerator of which only the name is known."""
        return cls(name=name)


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


def parse_ports(value: object) -> PortRange:
    """Parse a range such as `29500-29600`; ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"want FIRST-LAST, as 29500-29600; got {shown(value)}")
    ports = PortRange(first=int(found[1]), last=int(found[2]))
    if not 0 < ports.first <= ports.last < 65536:
        raise ValueError(f"want ports from 1 to 65535, the lower one first; got {shown(value)}")
    return ports


PORTS = Read(
    parse_ports,
    {"type": "string", "pattern": "^[0-9]{1,5}-[0-9]{1,5}$", "examples": ["29500-29600"]},
)
_PROXY = rf"^http://(\[[0-9A-Fa-f:.]+\]|{HOST}):[0-9]{{1,5}}/?$"


def _proxy(value: str) -> str:
    if re.fullmatch(_PROXY, value) is None:
        # The value is not shown, for it may have a password.
        raise ValueError("want http://HOST:PORT; user and password only in $ISTHMUS_PROXY")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"want a path from the root on, as /data/project; got {shown(value)}")
    return value


Proxy = Annotated[
    str,
    Checked(
        _proxy, {"type": "string", "pattern": _PROXY, "examples": ["http://proxy.example:3128"]}
    ),
]
AbsolutePath = Annotated[Text, Checked(_absolute)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site(Section):
    """One data center."""

    parts: ClassVar[Mapping[str, str]] = {"wan": "How a site meets the WAN."}
    name: Name
    index: Annotated[int, Unwritten] = 0
    """Position in the topology: the order in which contributions are summed."""
    like: str | None = None
    """Another site, whose nodes, accelerators, fabric, wan (its nic and gateways_per_node),
    launcher and prologue this one has unless it says otherwise. Never its location."""
    location: Location | None = None
    nodes: Annotated[Count, Derived] = 1
    """Machines."""
    hosts: tuple[Host, ...] = field(default=(), compare=False)
    """Of the site's machines, one a node, the agent's first: by which they reach each other, and
    where their gateways listen unless wan.interfaces says. [one machine; with launcher: slurm those
    of its allocation]"""
    accelerators_per_node: Annotated[int, Bounds(ge=1, le=MAX_RANKS_PER_NODE), Derived] = 1
    """One rank each."""
    accelerator: Annotated[Accelerator, WrittenAs(str, Accelerator.named), Derived] = Accelerator()
    """A name under accelerators, or of one that ships."""
    fabric: Fabric | None = None
    gateways_per_node: Annotated[
        int, Key("wan.gateways_per_node"), number_or(AUTO, MAX_RANKS_PER_NODE, 1)
    ] = 1
    """Processes that carry a node's traffic, each that of as many ranks; auto: as many as its
    links, its card and its cores ask for."""
    chooses_gateways: Annotated[bool, Unwritten] = field(default=False, compare=False)
    """Whether `gateways_per_node` has yet to be decided, for a run (topology/spec/lanes.py)."""
    nic_bytes_per_s: Annotated[Rate | None, Key("wan.nic")] = None
    """Of each node, towards the WAN. [as much as its links carry]"""
    address: Annotated[Host, Key("wan.address"), Derived] = ""
    """Host that peers dial, and gateways bind unless bind or interfaces say otherwise. [127.0.0.1;
    with interfaces theirs]"""
    inbound: Annotated[bool, Key("wan.inbound")] = True
    """false: behind NAT or a firewall, so that nobody can dial its gateways; they dial for both
    directions."""
    bind: Annotated[Host, Key("wan.bind"), Derived] = field(default="", compare=False)
    """Host that gateways bind, where it is not the one that peers dial."""
    interfaces: Annotated[tuple[Text, ...], Key("wan.interfaces")] = field(
        default=(), compare=False
    )
    """Network interfaces whose addresses gateways bind, those of a node in turn; peers dial these
    unless there is an address."""
    proxy: Annotated[Proxy, Key("wan.proxy"), Derived] = field(default="", compare=False)
    """HTTP proxy through which the site's agent reaches the coordinator."""
    ports: Annotated[PortRange | None, PORTS, Key("wan.ports")] = field(default=None, compare=False)
    """Gateways bind ports of this range, one each. [any]"""
    launcher: Launcher = field(default=Launcher(), compare=False)
    job_folder: Annotated[AbsolutePath, Derived] = field(default="", compare=False)
    """Where the files of a job lie there, as they lie beside the job file here. [they are carried
    there]"""
    prologue: Annotated[tuple[Text, ...], Bounds(max_length=PROLOGUE_MAX)] = field(
        default=(), compare=False
    )
    """Lines for a login shell (bash) before a job's ranks start: `module load cuda`, `source
    env/bin/activate`. `$@` is the ranks' command."""

    @property
    def dialled(self) -> str:
        """Host that peers dial, of several machines the first's; empty: known once they listen."""
        if self.interfaces or self.address:
            return self.address
        return self.hosts[0] if self.hosts else self.bind or LOOPBACK

    @property
    def bound(self) -> str:
        """Host that its gateways bind; empty: unknown, or none."""
        if not self.inbound or self.interfaces:
            return ""
        return self.bind or self.dialled

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


def _instant(value: str) -> str:
    try:
        datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"want a time as 2026-05-01T12:00:00Z, got {shown(value)}") from error
    return value


Instant = Annotated[str, Checked(_instant, {"type": "string", "format": "date-time"})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Section):
    """What a probe found; wins over the described figures."""

    bytes_per_s: Annotated[Rate | None, Key("bandwidth")] = None
    rtt_s: Annotated[Duration | None, Key("rtt")] = None
    jitter_s: Annotated[Duration | None, Key("jitter")] = None
    loss: Loss | None = None
    at: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Section):
    """The WAN between two sites: full duplex, or one direction with `oneway: true`."""

    ends: Annotated[tuple[str, str], Key("between")]
    is_oneway: Annotated[bool, Key("oneway")] = field(default=False, compare=False)
    """From the first site to the second only."""
    described_bytes_per_s: Annotated[Rate | None, Key("bandwidth")] = field(
        default=None, compare=False
    )
    """Of each direction."""
    described_rtt_s: Annotated[Duration | None, Key("rtt")] = field(default=None, compare=False)
    """There and back."""
    distance_km: Annotated[Distance | None, Key("distance")] = None
    """On the map; gives an RTT when none is known."""
    jitter_s: Annotated[Duration, Key("jitter")] = 0.0
    """Most that the delay of one direction varies."""
    loss: Loss = 0.0
    egress_usd_per_byte: Annotated[PricePerByte, Key("egress"), Derived] = 0.0
    max_flows: Count | None = None
    """TCP connections at most."""
    window_bytes: Annotated[Size | None, Key("window")] = None
    """TCP window of one connection at most."""
    congestion: Annotated[str, choice(CONGESTION)] | None = None
    """What TCP follows at the sender; else bbr where gateways may choose it, or the host's."""
    share: Share = 1.0
    """Of the bandwidth that a run may use."""
    schedule: tuple[Period, ...] = ()
    measured: Measured = field(default=Measured(), compare=False)
    bytes_per_s: Annotated[float, Unwritten] = 0.0
    """Bytes per second that a run may use, after the share; a measured figure overrides the
    described one, which is None if there is no measured one, once the topology is resolved."""
    bandwidth_origin: Annotated[str, Unwritten] = "bandwidth"
    """The origin of the bandwidth: `measured`, or `bandwidth`: as described."""
    rtt_s: Annotated[float, Unwritten] = 0.0
    """Likewise of the round trip."""
    rtt_origin: Annotated[str, Unwritten] = "rtt"
    """The origin of the RTT: `measured`, `rtt`, `distance` or `locations`."""
    measured_at: Annotated[str | None, Unwritten] = None
    """The time when a probe measured it, in ISO 8601."""

    @property
    def source(self) -> str:
        """The site that sends."""
        return self.ends[0]

    @property
    def target(self) -> str:
        """The site that receives."""
        return self.ends[1]

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


def parse_endpoint(value: object) -> Endpoint:
    """Parse HOST:PORT, or [HOST]:PORT for IPv6; ValueError for anything else."""
    found = re.fullmatch(rf"(\[[0-9A-Fa-f:.]+\]|{HOST}):([0-9]{{1,5}})", str(value))
    if not isinstance(value, str) or found is None or int(found[2]) > 65535:
        raise ValueError(f"want HOST:PORT, as 127.0.0.1:7443; got {shown(value)}")
    return Endpoint(host=found[1].strip("[]"), port=int(found[2]))


ENDPOINT = Read(parse_endpoint, {"type": "string", "examples": ["127.0.0.1:7443"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator(Section):
    """Where the control plane runs."""

    site: str | None = None
    """The site that hosts it."""
    bind: Annotated[Endpoint, ENDPOINT, Key("bind", default=f"{LOOPBACK}:0")] = Endpoint(
        host=LOOPBACK, port=0
    )
    """Where it listens; port 0 lets the system choose."""
    address: Annotated[Endpoint | None, ENDPOINT] = field(default=None, compare=False)
    """Where others dial it, where that is not what it binds."""

    @property
    def dialled(self) -> Endpoint:
        """Where others dial it."""
        return self.address or self.bind


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
class Security(Section):
    """How the connections between sites are protected.

    `{name}` in a path is who reads the file: `coordinator`, `operator`, `eu.agent`.
    """

    mode: Annotated[str, choice(SECURITY_MODES)] = "insecure"
    """mtls: certificates. insecure: no TLS, and so loopback addresses only."""
    ca: Text = field(default="certs/ca.pem", compare=False)
    """PEM file of the authority's certificate."""
    cert: Text = field(default="certs/{name}.pem", compare=False)
    """PEM file; {name} is who reads it."""
    key: Text = field(default="certs/{name}.key", compare=False)
    """PEM file."""

    @property
    def tls_files(self) -> tuple[str, str, str] | None:
        """The PEM files of authority, certificate and key; None: TLS is off."""
        return (self.ca, self.cert, self.key) if self.mode == "mtls" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology(Section):
    """A topology file: sites, and the WAN between them."""

    is_document: ClassVar[bool] = True
    name: Name
    accelerators: Mapping[Name, Accelerator] = field(default_factory=dict, compare=False)
    """By name, instead of those that ship: `isthmus topology accelerators`."""
    sites: Annotated[tuple[Site, ...], Bounds(min_length=1, max_length=MAX_SITES)]
    links: tuple[Link, ...] = ()
    coordinator: Coordinator = Coordinator()
    failure: Detection = Detection()
    security: Security = Security()
    emulate: bool = False
    """Put an emulated WAN between the sites, on this machine."""
    emulator: Annotated[str, choice(EMULATORS)] = "auto"
    emulation: Emulation = Emulation()
    _by_pair: Mapping[tuple[str, str], Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = {link.ends: link for link in self.links}
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
