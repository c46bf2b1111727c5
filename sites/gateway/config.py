"""The configuration of a gateway: the first message that its agent sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Probe
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import PortRange
from isthmus.topology.trees.channels import FLOWS_MAX

CHUNK_BYTES_MAX = EXCHANGE_CHANNEL_BYTES - 128
"""Largest chunk, in float32 bytes, that fits a frame with any codec. 1 to 4 MiB is best; 8 MiB
where no link is the bottleneck."""

HELD_BYTES = 512 << 20

GatewayId = tuple[int, int]
"""One gateway of the run: (index of its site, its number within the site)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """How long others may wait for a rank before it counts as late."""

    least_s: float
    rounds: int
    """Limit in multiples of the median round time; 0: use only the limits in seconds."""
    first_s: float
    """Lower limit during the first rounds of a run, when ranks compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The link to one neighbouring site, as configured."""

    site: str
    bytes_per_s: float
    rtt_s: float
    max_flows: int = FLOWS_MAX
    """Upper limit on TCP connections when the job does not fix their number."""
    is_shared: bool = False
    """The operator gave this run a share of the link: `bytes_per_s` is never exceeded."""
    congestion: str = ""
    """TCP congestion control, by Linux's name. Empty: BBR if this process may choose it, else the
    host's default."""
    dials_in: bool = False
    """The peer accepts no connections. It dials this site, and both directions use its
    connections."""


class GatewayConfig(Message):
    """Everything that a gateway needs before it gets its peers' addresses."""

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
    """Ranks per gateway, by site. Gateway 0 serves the first ranks of its site."""
    plan: ReductionPlan
    codecs: tuple[str, ...]
    """Codec names, one per tree of the plan. A gather has one."""
    error_feedback: bool
    """Whether the residual of a lossy codec is added to the next gradient."""
    error_feedback_decay: float = 1.0
    """Factor on that residual in each round."""
    chunk_bytes: int
    channels_per_link: int | None
    """TCP connections to each peer gateway. None: chosen and adapted at run time."""
    window_bytes: int | None
    verify_every: int
    bind_host: str
    """Address to listen on. Empty: the address of `interface`."""
    interface: str = ""
    dialled_host: str = ""
    """Host that peers dial, if it differs from the bound address (NAT). Empty: the bound
    address."""
    ports: PortRange | None = None
    """Ports that this gateway may bind. None: any free port."""
    listens: bool = True
    """False: this gateway accepts no connections; it dials its peers for both directions."""
    socket_path: str
    """Path of the Unix socket on which this gateway's ranks connect."""
    state_folder: str = ""
    """Folder of this node for the training state that a rejoining site copies from the others."""
    fetches_state: bool = True
    """Whether this gateway fetches that state on behalf of all gateways of its node."""
    steps_per_round: int = 1
    """Steps that ranks make from one round of the regime to the next."""
    return_share: float = 1.0
    """Share of a link's bandwidth that the transfer of such a state may use."""
    links: tuple[PeerLink, ...]
    """Outgoing links to the neighbours in the plan, or, if the plan may be switched, to every site
    that can become one."""
    non_finite: str = "carry"
    """How NaN and infinity in gradients are handled: one of topology.spec.job.NON_FINITE."""
    held_bytes: int = HELD_BYTES
    """Memory limit for peers' frames that wait to be summed. More is used if links would idle."""
    pipeline_bytes: int = 0
    """float32 bytes that must be in flight (sent, no result yet) to keep the links busy."""
    peer_lost_s: float
    """Silence after which a peer counts as lost."""
    rank_wait_s: float
    """Deadline for a rank that waits to learn which plan its round uses."""
    keepalive_time_s: float
    keepalive_timeout_s: float
    stall: StallLimits | None = None
    """When a late rank is reported to the agent. None: never."""
    revoked: str = ""
    """List of revoked certificates (PEM) that peers may not show. Empty: there is none."""
    probe: Probe | None = None
    """Set if this gateway only measures its links and serves no ranks."""

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
        """Check that the edges in `way` lead from every member to the root."""
        # The second test rejects a root that also has a parent.
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
        """Index of this site in `sites`."""
        return self.sites.index(self.site)

    def index_of(self, site: str) -> int:
        """Return the index of `site` in `sites`.

        Raises:
            ConfigError: the run has no such site.
        """
        if site not in self.sites:
            raise ConfigError(f"{site!r} is not one of {', '.join(self.sites)}")
        return self.sites.index(site)

    @property
    def ranks_per_site(self) -> tuple[int, ...]:
        """Number of ranks of each site, over all its gateways."""
        return tuple(
            gateways * ranks
            for gateways, ranks in zip(self.gateways_per_site, self.ranks_per_gateway, strict=True)
        )

    @property
    def chunk_numel(self) -> int:
        """Largest number of float32 elements in a chunk."""
        return self.chunk_bytes // 4
