"""What a gateway is told by its agent first: its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.protos.frame import MAX_PAYLOAD_BYTES
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Probe
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import PortRange
from isthmus.topology.trees.channels import FLOWS_MAX

CHUNK_BYTES_MAX = MAX_PAYLOAD_BYTES - 64
"""What no codec makes longer than a frame may be; 1 to 4 MiB is best, and 8 MiB where no link is
the limit."""

HELD_BYTES = 512 << 20

GatewayId = tuple[int, int]
"""Index of a site, and the number of a gateway there: one gateway of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """How long others may wait for a rank before it counts as late."""

    least_s: float
    rounds: int
    """Others wait for so many median rounds at least; 0: rounds do not count."""
    first_s: float
    """Others wait for so long at least while a run is in its first rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The link to one neighbouring site, as configured."""

    site: str
    bytes_per_s: float
    rtt_s: float
    max_flows: int = FLOWS_MAX
    """TCP connections at most, where the job leaves their number open."""
    is_shared: bool = False
    """A share of the bandwidth was set: never more than `bytes_per_s` is sent, so that others
    keep the rest."""
    congestion: str = ""
    """The congestion control of its connections, by Linux's name; empty: BBR where it may be
    chosen, else this host's."""
    dials_in: bool = False
    """The site cannot be dialled: it dials this one, for both directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything that a gateway needs to know before its peers' addresses."""

    run_id: str
    generation: int
    config_hash: str
    site: str
    gateway: int
    """The number of this gateway at its site, from 0."""
    sites: tuple[str, ...]
    """All sites, in the order in which contributions are summed."""
    gateways_per_site: tuple[int, ...]
    ranks_per_gateway: tuple[int, ...]
    """The number of ranks that one gateway serves, for each site: gateway 0 has the first ones."""
    plan: ReductionPlan
    codecs: tuple[str, ...]
    """The codec of each of the plan's trees; a gather has one."""
    error_feedback: bool
    """Whether what a codec loses of a gradient is added to the next one."""
    chunk_bytes: int
    channels_per_link: int | None
    """TCP connections to each gateway: exactly so many; None: as many as it takes."""
    window_bytes: int | None
    verify_every: int
    bind_host: str
    """Empty: the address of `interface`."""
    interface: str = ""
    told_host: str = ""
    """Where others dial; empty: what is bound."""
    ports: PortRange | None = None
    """What may be bound; None: any port."""
    listens: bool = True
    """False: this gateway cannot be dialled, and dials for both directions."""
    socket_path: str
    """Where its ranks reach this gateway."""
    state_folder: str = ""
    """The node's, where the state lies that a site takes over when it enters."""
    fetches_state: bool = True
    """Whether this gateway fetches it, for all gateways of its node."""
    return_share: float = 1.0
    """The share of each link that such a state may take."""
    links: tuple[PeerLink, ...]
    """To each neighbour, in the sending direction; where plans may be switched, to each site that
    this one could have for a neighbour."""
    non_finite: str = "carry"
    """One of isthmus.topology.spec.job.NON_FINITE."""
    held_bytes: int = HELD_BYTES
    """Bytes of peers' frames that may wait here to be summed, as far as links are kept busy."""
    pipeline_bytes: int = 0
    """float32 bytes that have to be able to be without a result, or links would wait for
    results."""
    peer_lost_s: float
    """Silence after which a peer counts as lost."""
    rank_wait_s: float
    """How long a rank may wait here to hear which plan carries its round."""
    keepalive_time_s: float
    keepalive_timeout_s: float
    stall: StallLimits | None = None
    """When a rank that does not come is told of; None: never."""
    probe: Probe | None = None
    """The gateway measures its links, and serves no ranks; None: it does not."""

    def __post_init__(self) -> None:
        if not 4 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ConfigError(
                f"exchange.chunk_bytes: want 4 to {CHUNK_BYTES_MAX}, got {self.chunk_bytes}"
            )
        if self.channels_per_link is not None and self.channels_per_link < 1:
            raise ConfigError(
                f"exchange.channels_per_link: want 1 or more, got {self.channels_per_link}"
            )
        num_sites = len(self.sites)
        for name in ("gateways_per_site", "ranks_per_gateway"):
            counts = getattr(self, name)
            if len(counts) != num_sites or min(counts) < 1:
                raise ConfigError(f"{name}: want 1 or more for each of {num_sites} sites")
        self._check_plan()
        if self.site not in self.sites:
            raise ConfigError(f"site: {self.site!r} is not one of {', '.join(self.sites)}")
        if not 0 <= self.gateway < self.gateways_per_site[self.site_index]:
            raise ConfigError(f"gateway: site {self.site} has no gateway {self.gateway}")

    def _check_plan(self) -> None:
        num_sites = len(self.sites)
        if self.plan.num_sites != num_sites:
            raise ConfigError(f"plan: of {self.plan.num_sites} sites; here are {num_sites}")
        if len(self.codecs) != max(1, len(self.plan.trees)):
            raise ConfigError(f"codecs: want one a tree of {len(self.plan.trees)}, or one")
        for index, tree in enumerate(self.plan.trees):
            members = self.plan.members
            self._check_way(f"plan.trees.{index}", tree.root, tree.parent, members)
            members = (*members, *tree.followers)
            self._check_way(f"plan.trees.{index}.down", tree.root, tree.giver, members)

    def _check_way(
        self, path: str, root: int, way: Mapping[int, int], members: Sequence[int]
    ) -> None:
        """Check that following `way` from any of some sites leads to the root."""
        # A site that is its own root, too, would have a parent all the same.
        if {root, *way} != set(members) or len(way) != len(members) - 1:
            raise ConfigError(f"{path}: want each of {len(members)} sites once")
        for site in way:
            at = site
            for _ in way:
                at = way.get(at, root)
            if at != root:
                raise ConfigError(f"{path}: site {site} never gets to the root")

    @property
    def site_index(self) -> int:
        """This site's place among `sites`."""
        return self.sites.index(self.site)

    def index_of(self, site: str) -> int:
        """Return a site's place among `sites`.

        Raises:
            ConfigError: it is none of them.
        """
        if site not in self.sites:
            raise ConfigError(f"{site!r} is not one of {', '.join(self.sites)}")
        return self.sites.index(site)

    @property
    def ranks_per_site(self) -> tuple[int, ...]:
        """Ranks of each site, all gateways together."""
        return tuple(
            gateways * ranks
            for gateways, ranks in zip(self.gateways_per_site, self.ranks_per_gateway, strict=True)
        )

    @property
    def chunk_numel(self) -> int:
        """float32 elements of a chunk, at most."""
        return self.chunk_bytes // 4
