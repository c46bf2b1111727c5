"""Questions about a machine before a run, and their answers.

`python -m isthmus.sites.facts` answers on the machine itself. Both sides may be of different
builds: unknown fields are skipped, and unknown facts are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.world import PortRange

Count = Annotated[int, 1 << 62]
"""A number of things or bytes, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The paths and addresses of a run that a machine should check."""

    addresses: tuple[str, ...] = ()
    """Hosts on which a process will listen."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces on which a process will listen."""
    endpoints: tuple[str, ...] = ()
    """HOST:PORT on which a process will listen."""
    peers: tuple[str, ...] = ()
    """Hosts that connections will lead to."""
    folders: tuple[str, ...] = ()
    """Folders that will be written to; they need not exist yet."""
    script: str | None = None
    """The training script."""
    working_folder: str | None = None
    """The folder in which it will run."""
    globs: tuple[str, ...] = ()
    """Absolute patterns of the files that are learnt from."""
    accelerators: bool = False
    """Whether to ask torch about accelerators, if there are signs of any; takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script, as far as it can be known without running it."""

    path: str
    error: str | None = None
    """The reason why it cannot be run at all."""
    line: Count = 0
    """The place of a syntax error, counted from 1; 0: there is none."""
    column: Count = 0
    joins: bool = True
    """Whether it, or a module beside it that it imports, calls `isthmus.join`; True in doubt."""
    averages: bool = True
    """Whether one of them averages something over sites, or says that none does; True in doubt."""
    uses_own: str = ""
    """What one of them calls that reads weights, to evaluate, save or average them, where none of
    them has `site.global_parameters`; empty: there is none, or in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """The files that one pattern matches."""

    pattern: str
    num_files: Count
    """The files that were found before the search ended."""
    error: str | None = None
    """The first file that cannot be read, and why; or why the pattern cannot be matched."""
    is_complete: bool = True
    """Whether there are no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder, or the nearest one above that is there."""

    path: str
    error: str | None = None
    """The reason why nothing can be written there."""
    free_bytes: Count | None = None
    """Free bytes for users other than root."""
    free_files: Count | None = None
    """Files that can still be made; None: the file system has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a process of this user; None: no limit."""

    open_files: Count | None = None
    processes: Count | None = None
    """Limit on this user's processes and threads; None also for root."""
    locked_bytes: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcp:
    """The settings of the machine's TCP; None: not known, as on other systems than Linux."""

    receive_max_bytes: Count | None = None
    send_max_bytes: Count | None = None
    slow_start_after_idle: bool | None = None
    congestion: str | None = None
    """Default congestion control of connections."""
    congestion_allowed: tuple[str, ...] | None = None
    """The congestion controls that a process of this user may choose."""
    lacks_kernel_tls: str | None = None
    """What is missing for TLS by the kernel; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """The accelerators that torch sees."""

    names: tuple[str, ...] = ()
    nccl: bool = False
    """Whether torch has NCCL."""
    error: str | None = None
    """The reason why torch cannot tell, though the machine has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaDevice:
    """A device of a machine with several NUMA nodes, and the one that it is on."""

    kind: str
    """`card` or `interface`."""
    name: str
    """Index of a card, as CUDA counts; name of an interface."""
    node: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine, as one of its processes sees it."""

    host: str
    user: str
    clock_s: float
    """Unix time by the machine's clock."""
    build: str
    """The version of isthmus."""
    control_protocols: tuple[int, int]
    """Oldest and newest version of the control protocol."""
    exchange_protocols: tuple[int, int]
    python: str
    torch: str | None
    """The version of torch; None: it is not installed."""
    lacks: str | None = None
    """Packages missing for ranks and gateways; None: none."""
    plain: str | None = None
    """Why isthmus runs as plain Python; None: it is compiled."""
    usable_cores: Count | None = None
    """Processor cores that its processes may use."""
    limits: Limits = Limits()
    tcp: Tcp = Tcp()
    shared_memory_bytes: Count | None = None
    """Free bytes of /dev/shm; None: there is none."""
    has_infiniband: bool = False
    refused: Mapping[str, str] | None = None
    """The wanted addresses and endpoints that nothing can listen on, each with the reason."""
    mtus_bytes: Mapping[str, Count] | None = None
    """The MTU towards each peer to which there is a route."""
    unrouted: Mapping[str, str] | None = None
    """The peers to which there is no route, each with the reason."""
    folders: tuple[Folder, ...] = ()
    script: Script | None = None
    working_folder_error: str | None = None
    """Reason why no process can run in the working folder; None: it can, or it was not asked."""
    globs: tuple[Matches, ...] = ()
    gpus: tuple[str, ...] | None = None
    """GPUs listed by the kernel's drivers, by model; None: there are some of unknown model."""
    accelerators: Accelerators | None = None
    """None: not asked, or no sign of any."""
    numa: tuple[NumaDevice, ...] = ()
    """Cards, and the interfaces on which a process will listen, else that of the default route;
    empty where the machine has one NUMA node."""


class Burned(Message):
    """What became of a device that was loaded for a while."""

    index: Count
    """Its number on the machine."""
    device: str
    """Its name, or `cpu`."""
    product: str = ""
    """A checksum of what it computes; empty: it has not come to it."""
    num_products: Count = 0
    copy_bytes_per_s: float = 0.0
    """How fast bytes have gone to it and back, at best."""
    problem: str = ""
    """What is wrong with it; empty: nothing was found."""


class AskFacts(Message):
    """What is the machine like? Facts answer."""

    wanted: Wanted = Wanted()


class AskClock(Message):
    """What Unix time is it by the machine's clock?"""


class AskListen(Message):
    """On which port does it listen now? It sends back what comes."""

    host: str
    ports: PortRange | None = None
    """None: any."""


class AskReach(Message):
    """Why can it not exchange data with a host that sends back what comes? Empty: it can."""

    source: str
    host: str
    port: int
    within_s: float


class AskBurnIn(Message):
    """What becomes of each device that is loaded for a while?"""

    for_s: float


class Answer(Message):
    """The answer to any of these."""

    result: Any = None
    problem: str = ""
    """Why there is no result."""


Question = AskFacts | AskClock | AskListen | AskReach | AskBurnIn
