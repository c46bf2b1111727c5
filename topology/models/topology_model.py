"""The topology file as a user writes it.

topology/documents/resolve.py converts it to the classes of topology/spec/world.py.

References to names are not checked here, but in topology/documents/references.py.
"""

from __future__ import annotations

import ipaddress
import re
from datetime import datetime
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.units import BDP, SIZE, UnitError, parse_size
from isthmus.topology.spec.world import (
    EARLY_ENDS,
    EMULATORS,
    LAUNCHERS,
    SCRIPT_ERRORS,
    SECURITY_MODES,
    Detection,
    Endpoint,
    Launcher,
    Listening,
    PortRange,
    Tls,
)
from isthmus.topology.spec.world import Queue as LinkQueue
from isthmus.topology.spec.yaml_keys import (
    Compute,
    Count,
    Distance,
    Duration,
    KeyedError,
    Loss,
    Name,
    Number,
    PositiveDuration,
    PricePerByte,
    PricePerHour,
    Rate,
    Share,
    Size,
    Text,
    Version,
    Word,
    choice,
)
from isthmus.topology.spec.yaml_models import Strict

MAX_SITES = 64
MAX_RANKS_PER_NODE = 128
PROLOGUE_MAX = 100
"""Limit on the lines before a site's ranks."""
MAX_FLOWS = 32
"""Limit on competing flows on a link: two processes carry them all."""
LOOPBACK = "127.0.0.1"
MFU = 0.4
"""Default MFU: the share of an accelerator's peak that a large model's training step reaches.

Reported: 38 to 43 % for Llama 3 405B on 8,192 to 16,384 H100s (arXiv 2407.21783, table 4), 41 to
42 % for Nemotron-4 340B on 6,144 H100s (arXiv 2406.11704), 46 % for PaLM 540B on 6,144 TPU v4s
(arXiv 2204.02311).
"""

_HOST = r"\w[\w.-]*"
"""A name in DNS or /etc/hosts; it cannot be taken for an option."""
_JUMP = rf"^([^\s@:-][^\s@:]*@)?{_HOST}(:[0-9]{{1,5}})?$"
_PROXY = rf"^http://(\[[0-9A-Fa-f:.]+\]|{_HOST}):[0-9]{{1,5}}/?$"
_CLOCK = r"^([01][0-9]|2[0-3]):[0-5][0-9]$|^24:00$"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, without asking a resolver."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _clock(value: object) -> int:
    if not isinstance(value, str) or re.fullmatch(_CLOCK, value) is None:
        raise ValueError(f"want a time of day as 08:00, got {shown(value)}")
    hours, minutes = value.split(":")
    return int(hours) * 60 + int(minutes)


def parse_endpoint(value: object) -> Endpoint:
    """Parse HOST:PORT, or [HOST]:PORT for IPv6; ValueError for anything else."""
    found = re.fullmatch(rf"(\[[0-9A-Fa-f:.]+\]|{_HOST}):([0-9]{{1,5}})", str(value))
    if not isinstance(value, str) or found is None or int(found[2]) > 65535:
        raise ValueError(f"want HOST:PORT, as 127.0.0.1:7443; got {shown(value)}")
    return Endpoint(host=found[1].strip("[]"), port=int(found[2]))


def parse_ports(value: object) -> PortRange:
    """Parse a range such as `29500-29600`; ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"want FIRST-LAST, as 29500-29600; got {shown(value)}")
    ports = PortRange(first=int(found[1]), last=int(found[2]))
    if not 0 < ports.first <= ports.last < 65536:
        raise ValueError(f"want ports from 1 to 65535, the lower one first; got {shown(value)}")
    return ports


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"want a path from the root on, as /data/project; got {shown(value)}")
    return value


def _host(value: str) -> str:
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if re.fullmatch(_HOST, host) is None and not _is_address(host):
        raise ValueError(
            f"want a host, as eu.example.org or ::1, without a port; got {shown(value)}"
        )
    return host


def _proxy(value: str) -> str:
    if re.fullmatch(_PROXY, value) is None:
        # The value is not shown, for it may have a password.
        raise ValueError("want http://HOST:PORT; user and password only in $ISTHMUS_PROXY")
    return value


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _jump(value: str) -> str:
    if re.fullmatch(_JUMP, value) is None:
        raise ValueError(f"want user@host:port (user and port may lack), got {shown(value)}")
    return value


def parse_queue(value: object) -> LinkQueue:
    """Parse a queue size such as `256KiB` or `0.5BDP`; UnitError for anything else, and for 0."""
    if isinstance(value, str) and value.endswith("BDP"):
        queue = LinkQueue(bdp=BDP.number(value))
    else:
        try:
            queue = LinkQueue(num_bytes=parse_size(value))
        except UnitError as error:
            raise UnitError(f"want 0.5BDP (bandwidth x round trip), or a size: {error}") from error
    if queue == LinkQueue():
        raise UnitError(f"must be more than 0, got {shown(value)}")
    return queue


def _instant(value: str) -> str:
    try:
        datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"want a time as 2026-05-01T12:00:00Z, got {shown(value)}") from error
    return value


Clock = Annotated[
    int, PlainValidator(_clock), WithJsonSchema({"type": "string", "pattern": _CLOCK})
]
Instant = Annotated[
    str, AfterValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})
]
Bind = Annotated[
    Endpoint,
    PlainValidator(parse_endpoint),
    WithJsonSchema({"type": "string", "examples": ["127.0.0.1:7443"]}),
]
Host = Annotated[Text, AfterValidator(_host)]
AbsolutePath = Annotated[Text, AfterValidator(_absolute)]
Proxy = Annotated[
    str,
    AfterValidator(_proxy),
    WithJsonSchema(
        {"type": "string", "pattern": _PROXY, "examples": ["http://proxy.example:3128"]}
    ),
]
Ports = Annotated[
    PortRange,
    PlainValidator(parse_ports),
    WithJsonSchema(
        {"type": "string", "pattern": "^[0-9]{1,5}-[0-9]{1,5}$", "examples": ["29500-29600"]}
    ),
]
Jump = Annotated[
    str,
    AfterValidator(_jump),
    WithJsonSchema({"type": "string", "pattern": _JUMP, "examples": ["me@gate.example:22"]}),
]
Queue = Annotated[
    LinkQueue,
    PlainValidator(parse_queue),
    WithJsonSchema(
        {
            "type": "string",
            "anyOf": [{"pattern": BDP.pattern}, {"pattern": SIZE.pattern}],
            "examples": ["0.5BDP", "256KiB"],
        }
    ),
]
Congestion = Literal["cubic", "reno", "bbr"]
CONGESTION: tuple[str, ...] = get_args(Congestion)
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


def default(text: str, description: str) -> Any:  # noqa: ANN401 - any field takes it
    """Return a field's default in the user's spelling, so that the schema shows it that way."""
    return Field(default=text, description=description)


class LocationModel(Strict):
    """Where a site is, in degrees: gives distances, and so latencies."""

    lat: Annotated[Number, Field(ge=-90, le=90)]
    lon: Annotated[Number, Field(ge=-180, le=180)]


class AcceleratorModel(Strict):
    """What computes in a site."""

    peak: Annotated[dict[Dtype, Compute], Field(min_length=1)]
    memory: Size
    mfu: Share = default(f"{MFU:.0%}", description="Model FLOPs utilisation that a step reaches.")
    price: PricePerHour | None = None


class FabricModel(Strict):
    """The network inside a site."""

    node: Annotated[Rate, Field(description="Between accelerators of one node.")]
    cluster: Annotated[Rate, Field(description="Between nodes, a node.")]
    latency: Duration


def _gateways(value: object) -> int | str:
    """Return a number of gateways, or `auto`."""
    if value == AUTO:
        return AUTO
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANKS_PER_NODE:
        return value
    raise ValueError(
        f"want {AUTO}, or a whole number from 1 to {MAX_RANKS_PER_NODE}; got {shown(value)}"
    )


AUTO = "auto"
Gateways = Annotated[
    int | str,
    PlainValidator(_gateways),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_RANKS_PER_NODE},
                {"type": "string", "const": AUTO},
            ]
        }
    ),
]


class WanModel(Strict):
    """How a site meets the WAN."""

    gateways_per_node: Annotated[
        Gateways | None,
        Field(
            description="Processes that carry a node's traffic, each that of as many ranks; auto, "
            "also where nothing is said: as many as its links, its card and its cores ask for."
        ),
    ] = None
    nic: Annotated[Rate | None, Field(description="Of each node, towards the WAN.")] = None
    address: Annotated[
        Host | None,
        Field(
            description="Host that peers dial, and gateways bind unless bind or interfaces say "
            f"otherwise. [{LOOPBACK}; with interfaces theirs]"
        ),
    ] = None
    inbound: Annotated[
        bool,
        Field(
            description="false: behind NAT or a firewall, so that nobody can dial its gateways; "
            "they dial for both directions."
        ),
    ] = True
    bind: Annotated[
        Host | None,
        Field(description="Host that gateways bind, where it is not the one that peers dial."),
    ] = None
    interfaces: Annotated[
        list[Text],
        Field(
            default_factory=list,
            description="Network interfaces whose addresses gateways bind, those of a node in "
            "turn; peers dial these unless there is an address.",
        ),
    ]
    proxy: Annotated[
        Proxy | None,
        Field(description="HTTP proxy through which the site's agent reaches the coordinator."),
    ] = None
    ports: Annotated[
        Ports | None,
        Field(description="Gateways bind ports of this range, one each. [any]"),
    ] = None

    def listening(self) -> Listening:
        """Return the listening addresses of gateways."""
        return Listening(
            told=self.address or "",
            bind=self.bind or "",
            interfaces=tuple(self.interfaces),
            ports=self.ports,
        )


class LauncherModel(Strict):
    """How `isthmus up` starts the site's agent. `launch` alone starts all on this machine."""

    kind: Annotated[str, choice(LAUNCHERS, later=("agent", "kubernetes"))] = "local"
    host: Annotated[
        Host | None,
        Field(description="ssh: the machine. slurm: where srun is; none: on this machine."),
    ] = None
    user: Annotated[Word | None, Field(description="Who logs in there.")] = None
    port: Annotated[int, Field(ge=1, le=65535, description="Of its sshd.")] = 22
    key: Annotated[
        Word | None,
        Field(description="File of the private key; none: the ssh agent, and ~/.ssh."),
    ] = None
    known_hosts: Annotated[
        Word | None, Field(description="File of the host keys; none: ~/.ssh/known_hosts.")
    ] = None
    jump: Annotated[
        Jump | None,
        Field(description="A machine on the way, as user@host:port; user and port may lack."),
    ] = None
    python: Annotated[
        Word | None,
        Field(description="Python there with isthmus. [python3; at a local site: this one]"),
    ] = None
    folder: Annotated[
        Word | None,
        Field(
            description="The agent's folder there. [~/.local/state/isthmus/up/TOPOLOGY/SITE; at a "
            "local site: below HOME]"
        ),
    ] = None
    options: Annotated[
        list[Text],
        Field(
            default_factory=list,
            description="More arguments. slurm: of srun, as --partition=gpu. ssh: of the ssh by "
            "which the first of `hosts` reaches the others.",
        ),
    ]

    def resolved(self) -> Launcher:
        """Return this launcher as topology/spec/world.py has it."""
        return Launcher(**self.model_dump(exclude={"options"}), options=tuple(self.options))


class SiteModel(Strict):
    """One data center."""

    name: Name
    like: Annotated[
        str | None,
        Field(
            description="Another site, whose nodes, accelerators, fabric, wan (its nic and "
            "gateways_per_node) and launcher this one has unless it says otherwise. Never its "
            "location."
        ),
    ] = None
    location: LocationModel | None = None
    nodes: Annotated[Count | None, Field(description="Machines.")] = None
    hosts: Annotated[
        list[Host],
        Field(
            default_factory=list,
            description="Of the site's machines, one a node, the agent's first: by which they "
            "reach each other, and where their gateways listen unless wan.interfaces says. "
            "[one machine; with launcher: slurm those of its allocation]",
        ),
    ]
    accelerators_per_node: Annotated[
        int | None, Field(ge=1, le=MAX_RANKS_PER_NODE, description="One rank each.")
    ] = None
    accelerator: Annotated[
        str | None, Field(description="A name under accelerators, or of one that ships.")
    ] = None
    fabric: FabricModel | None = None
    wan: WanModel | None = None
    launcher: LauncherModel | None = None
    job_folder: Annotated[
        AbsolutePath | None,
        Field(
            description="Where the files of a job lie there, as they lie beside the job file here. "
            "[they are carried there]"
        ),
    ] = None
    prologue: Annotated[
        list[Text] | None,
        Field(
            max_length=PROLOGUE_MAX,
            description="Lines for a login shell (bash) before a job's ranks start: `module load "
            "cuda`, `source env/bin/activate`. `$@` is the ranks' command.",
        ),
    ] = None


class PeriodModel(Strict):
    """A time of day (UTC) in which another share of a link may be used."""

    start: Annotated[Clock, Field(alias="from")]
    end: Annotated[Clock, Field(alias="to")]
    share: Share

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.start == self.end:
            raise KeyedError("to", "want another time than from")
        return self


class MeasuredModel(Strict):
    """What a probe found; wins over the described figures."""

    bandwidth: Rate | None = None
    rtt: Duration | None = None
    jitter: Duration | None = None
    loss: Loss | None = None
    at: Instant | None = None


class LinkModel(Strict):
    """The WAN between two sites: full duplex, or one direction with `oneway: true`."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    oneway: Annotated[bool, Field(description="From the first site to the second only.")] = False
    bandwidth: Annotated[Rate | None, Field(description="Of each direction.")] = None
    rtt: Annotated[Duration | None, Field(description="There and back.")] = None
    distance: Annotated[
        Distance | None, Field(description="On the map; gives an RTT when none is known.")
    ] = None
    jitter: Duration = default("0s", description="Most that the delay of one direction varies.")
    loss: Loss = 0.0
    egress: PricePerByte | None = None
    max_flows: Annotated[Count | None, Field(description="TCP connections at most.")] = None
    window: Annotated[Size | None, Field(description="TCP window of one connection at most.")] = (
        None
    )
    congestion: Annotated[
        Congestion | None,
        Field(
            description="What TCP follows at the sender; else bbr where gateways may choose it, "
            "or the host's."
        ),
    ] = None
    share: Annotated[Share, Field(description="Of the bandwidth that a run may use.")] = 1.0
    schedule: list[PeriodModel] = Field(default_factory=list)
    measured: MeasuredModel | None = None


class CoordinatorModel(Strict):
    """Where the control plane runs."""

    site: Annotated[str | None, Field(description="The site that hosts it.")] = None
    bind: Bind = default(
        f"{LOOPBACK}:0", description="Where it listens; port 0 lets the system choose."
    )
    address: Annotated[
        Bind | None,
        Field(description="Where others dial it, where that is not what it binds."),
    ] = None


class FailureModel(Strict):
    """When something counts as failed."""

    detect_within: PositiveDuration = default(
        "15s", description="A dead process or a silent path is noticed within this."
    )
    ride_out: PositiveDuration = default(
        "10min",
        description="An outage of this length is waited out where too few sites are left.",
    )
    stall_within: Annotated[
        PositiveDuration | None,
        Field(
            description="A rank that does not come while others wait is named after this; when "
            "absent, after the larger of detect_within and five steps."
        ),
    ] = None
    coordinator_within: PositiveDuration = default(
        "1h", description="Sites go on without a coordinator for this long."
    )
    min_sites: Annotated[Count, Field(description="The fewest sites that a run goes on with.")] = 1
    max_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="A site that is lost is started again so often within an hour.",
        ),
    ] = 3
    return_share: Annotated[
        Share,
        Field(
            description="Of each link's bandwidth, what the state may take that a site takes over "
            "when it comes back."
        ),
    ] = 0.5
    start_within: PositiveDuration = default(
        "120s", description="Every site is up within this, or all are rolled back."
    )
    on_script_error: Annotated[
        str,
        choice(SCRIPT_ERRORS),
        Field(
            description="What becomes of a run whose script fails at one site: end, or go_on "
            "without that site, which then comes back as after an outage."
        ),
    ] = "end"
    on_early_end: Annotated[
        str,
        choice(EARLY_ENDS),
        Field(
            description="What becomes of a run where the script of one site ends while others go "
            "on: they go_on without that site, or it ends."
        ),
    ] = "go_on"
    allow_losses: Annotated[
        bool,
        Field(
            description="A run that ends with fewer sites than it began with, or without its last "
            "checkpoint, has succeeded like any other."
        ),
    ] = False

    def resolved(self) -> Detection:
        """Return the settings in base units."""
        return Detection(
            ends_on_script_error=self.on_script_error == "end",
            ends_on_early_end=self.on_early_end == "end",
            allows_losses=self.allow_losses,
            detect_within_s=self.detect_within,
            start_within_s=self.start_within,
            min_sites=self.min_sites,
            ride_out_s=self.ride_out,
            stall_within_s=self.stall_within,
            coordinator_within_s=self.coordinator_within,
            max_restarts=self.max_restarts,
            return_share=self.return_share,
        )


class SecurityModel(Strict):
    """How the connections between sites are protected."""

    mode: Annotated[
        str,
        choice(SECURITY_MODES),
        Field(description="mtls: certificates. insecure: no TLS, and so loopback addresses only."),
    ] = "insecure"
    ca: Annotated[
        Text | None, Field(description="PEM file of the authority's certificate [certs/ca.pem]")
    ] = None
    cert: Annotated[
        Text | None,
        Field(description="PEM file; {name} is who reads it [certs/{name}.pem]"),
    ] = None
    key: Annotated[Text | None, Field(description="PEM file [certs/{name}.key]")] = None

    def resolved(self) -> Tls | None:
        """Return the paths of certificates; None: TLS is off."""
        if self.mode != "mtls":
            return None
        given = {"ca": self.ca, "cert": self.cert, "key": self.key}
        return Tls(**{name: path for name, path in given.items() if path is not None})


class CrossTrafficModel(Strict):
    """Bulk TCP flows of somebody else on an emulated WAN; netns only."""

    flows: Annotated[int, Field(ge=1, le=MAX_FLOWS, description="On each directed link.")] = 1
    congestion: Annotated[
        Congestion | None, Field(description="What they follow; else what this host does.")
    ] = None


class EmulationModel(Strict):
    """Conditions of an emulated WAN that its links do not describe."""

    described: Annotated[
        float,
        Field(gt=0, le=1000, description="A run is told this many times the links' bandwidth."),
    ] = 1.0
    queue: Annotated[
        Queue | None,
        Field(description="Of each directed link, in bytes, or in products of bandwidth and RTT."),
    ] = None
    congestion: Annotated[
        Congestion | None,
        Field(description="What TCP between sites follows (netns); else what this host does."),
    ] = None
    cross_traffic: CrossTrafficModel | None = None


class TopologyModel(Strict):
    """A topology file: sites, and the WAN between them."""

    version: Version
    name: Name
    accelerators: dict[Name, AcceleratorModel] = Field(
        default_factory=dict,
        description="By name, instead of those that ship: `isthmus topology accelerators`.",
    )
    sites: Annotated[list[SiteModel], Field(min_length=1, max_length=MAX_SITES)]
    links: list[LinkModel] = Field(default_factory=list)
    coordinator: CoordinatorModel = Field(default_factory=CoordinatorModel)
    failure: FailureModel = Field(default_factory=FailureModel)
    security: SecurityModel = Field(default_factory=SecurityModel)
    emulate: bool = Field(
        default=False, description="Put an emulated WAN between the sites, on this machine."
    )
    emulator: Annotated[str, choice(EMULATORS)] = "auto"
    emulation: EmulationModel = Field(default_factory=EmulationModel)
