"""A resolved topology: sites and directed links, with all figures in base units.

Made from YAML by topology/documents/load.py; frozen. Rates are bytes per second, times are seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.topology.spec.json_fields import IF_USED, IN_USE, REQUIRED

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place on Earth, in degrees."""

    lat: float
    lon: float


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
class Fabric:
    """The network inside a site."""

    node_bytes_per_s: float
    """Bytes per second between accelerators of one node."""
    cluster_bytes_per_s: float
    """Bytes per second between nodes, for each node."""
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How `isthmus up` starts a site's agent."""

    kind: str = "local"
    """One of LAUNCHERS."""
    host: str | None = None
    user: str | None = None
    port: int = 22
    key: str | None = None
    """File of a private key; None: the ssh agent's, and those in ~/.ssh."""
    known_hosts: str | None = None
    """File of host keys; None: ~/.ssh/known_hosts."""
    jump: str | None = None
    """Jump host, user@host:port; user and port are optional."""
    python: str | None = None
    """Python at the site; None: python3, and at a local site the one that runs."""
    folder: str | None = None
    """Where the agent keeps its files; None: a folder named after topology and site."""
    options: tuple[str, ...] = ()
    """More arguments: of the srun that starts the agent, or of the ssh by which its machine starts
    the site's other nodes."""


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
    inbound: bool = field(default=True, metadata=REQUIRED)
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
    gateways_per_node: int = field(default=1, metadata=REQUIRED)
    """Gateways that divide the ranks of a node among them: a divisor of accelerators_per_node. 1
    while it has yet to be decided."""
    chooses_gateways: bool = field(default=False, compare=False, metadata=IF_USED)
    """Whether `gateways_per_node` has yet to be decided, for a run (topology/spec/lanes.py)."""
    job_folder: str = field(default="", compare=False, metadata=REQUIRED)
    """Folder at the site that corresponds to the folder of the job file; empty: the same path, or
    what is carried there."""
    prologue: tuple[str, ...] = field(default=(), compare=False, metadata=IN_USE)
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
class Period:
    """A time of day with another share of a link; it may include midnight."""

    start_minute: int
    """Minute of the day in UTC, 0 to 1440."""
    end_minute: int
    share: float
    """Share of the link that may be used in that time."""


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
class Detection:
    """The settings of failure detection."""

    detect_within_s: float
    """Seconds within which a dead process or a silent path is noticed; topology/spec/timeouts.py
    derives the short timeouts from it."""
    start_within_s: float
    """Seconds within which every site must be up, or all are rolled back."""
    min_sites: int = 1
    """The fewest sites that a run goes on with."""
    ride_out_s: float = 600.0
    """Longest outage in seconds that the run waits out; ranks' timeouts follow from it."""
    stall_within_s: float | None = None
    """Seconds after which a late rank is reported; None: the larger of `detect_within_s` and a few
    steps."""
    coordinator_within_s: float = 3600.0
    """Seconds that sites go on without a coordinator."""
    max_restarts: int = 3
    """Restarts of a lost site per hour, at most."""
    return_share: float = 0.5
    """Share of a link's bandwidth for the training state of a rejoining site."""
    ends_on_script_error: bool = True
    """Whether a script that fails at one site ends the run; else it is an outage of that site."""
    ends_on_early_end: bool = False
    """Whether a site whose script ends while others go on ends the run; else they go on without."""
    allows_losses: bool = False
    """Whether a run that ends with fewer sites, or without its last checkpoint, has plainly
    succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The size of a router's queue: one of the two figures, the other is 0."""

    num_bytes: int = 0
    bdp: float = 0.0
    """Size in bandwidth-delay products of the link."""

    def bytes_of(self, bytes_per_s: float, rtt_s: float) -> int:
        """Return the queue size of a link with those figures, at least one byte."""
        return max(1, self.num_bytes or round(self.bdp * bytes_per_s * rtt_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTraffic:
    """Competing bulk TCP flows."""

    flows: int
    """Number of flows on each directed link."""
    congestion: str | None = None
    """Congestion control of these flows; None: this host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The conditions of an emulated WAN that its links do not describe."""

    described: float = 1.0
    """Ratio of the bandwidth given to a run to that of the emulator's links."""
    queue: Queue | None = None
    """Queue of each directed link; None: the emulator's default."""
    congestion: str | None = None
    """The congestion control of TCP between sites (netns); None: this host's."""
    cross_traffic: CrossTraffic | None = None
    """Competing flows on each link (netns); None: none."""


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
