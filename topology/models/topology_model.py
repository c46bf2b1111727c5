"""The topology file as a user writes it.

topology/documents/resolve.py converts it to the classes of topology/spec/world.py.

References to names are not checked here, but in topology/documents/references.py.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from isthmus.topology.spec.addresses import HOST, Host
from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.world import (
    CONGESTION,
    EMULATORS,
    SECURITY_MODES,
    Detection,
    Emulation,
    Endpoint,
    Fabric,
    Launcher,
    Listening,
    Location,
    Period,
    PortRange,
    Tls,
)
from isthmus.topology.spec.yaml_keys import (
    Compute,
    Count,
    Distance,
    Duration,
    Loss,
    Name,
    PricePerByte,
    PricePerHour,
    Rate,
    Share,
    Size,
    Text,
    Version,
    choice,
    number_or,
)
from isthmus.topology.spec.yaml_models import Strict

MAX_SITES = 64
MAX_RANKS_PER_NODE = 128
PROLOGUE_MAX = 100
"""Limit on the lines before a site's ranks."""
LOOPBACK = "127.0.0.1"
MFU = 0.4
"""Default MFU: the share of an accelerator's peak that a large model's training step reaches.

Reported: 38 to 43 % for Llama 3 405B on 8,192 to 16,384 H100s (arXiv 2407.21783, table 4), 41 to
42 % for Nemotron-4 340B on 6,144 H100s (arXiv 2406.11704), 46 % for PaLM 540B on 6,144 TPU v4s
(arXiv 2204.02311).
"""

_PROXY = rf"^http://(\[[0-9A-Fa-f:.]+\]|{HOST}):[0-9]{{1,5}}/?$"


def parse_endpoint(value: object) -> Endpoint:
    """Parse HOST:PORT, or [HOST]:PORT for IPv6; ValueError for anything else."""
    found = re.fullmatch(rf"(\[[0-9A-Fa-f:.]+\]|{HOST}):([0-9]{{1,5}})", str(value))
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


def _proxy(value: str) -> str:
    if re.fullmatch(_PROXY, value) is None:
        # The value is not shown, for it may have a password.
        raise ValueError("want http://HOST:PORT; user and password only in $ISTHMUS_PROXY")
    return value


def _instant(value: str) -> str:
    try:
        datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"want a time as 2026-05-01T12:00:00Z, got {shown(value)}") from error
    return value


Instant = Annotated[
    str, AfterValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})
]
Bind = Annotated[
    Endpoint,
    PlainValidator(parse_endpoint),
    WithJsonSchema({"type": "string", "examples": ["127.0.0.1:7443"]}),
]
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
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


def default(text: str, description: str) -> Any:  # noqa: ANN401 - any field takes it
    """Return a field's default in the user's spelling, so that the schema shows it that way."""
    return Field(default=text, description=description)


class AcceleratorModel(Strict):
    """What computes in a site."""

    peak: Annotated[dict[Dtype, Compute], Field(min_length=1)]
    memory: Size
    mfu: Share = default(f"{MFU:.0%}", description="Model FLOPs utilisation that a step reaches.")
    price: PricePerHour | None = None


AUTO = "auto"
Gateways = Annotated[int | str, number_or(AUTO, MAX_RANKS_PER_NODE, AUTO)]


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
    location: Location | None = None
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
    fabric: Fabric | None = None
    wan: WanModel | None = None
    launcher: Launcher | None = None
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
        Annotated[str, choice(CONGESTION)] | None,
        Field(
            description="What TCP follows at the sender; else bbr where gateways may choose it, "
            "or the host's."
        ),
    ] = None
    share: Annotated[Share, Field(description="Of the bandwidth that a run may use.")] = 1.0
    schedule: list[Period] = Field(default_factory=list)
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
    failure: Detection = Field(default_factory=Detection)
    security: SecurityModel = Field(default_factory=SecurityModel)
    emulate: bool = Field(
        default=False, description="Put an emulated WAN between the sites, on this machine."
    )
    emulator: Annotated[str, choice(EMULATORS)] = "auto"
    emulation: Emulation = Field(default_factory=Emulation)
