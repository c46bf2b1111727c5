"""What one rank knows of itself and of its run from the start: none of it changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.sites.local.rank_messages import Welcome
from isthmus.topology.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's place in its site, its site's place in the run, and the run."""

    welcome: Welcome
    """The gateway's answer: the sites, and how many ranks each has."""
    spec: RunSpec
    run_folder: Path
    device: torch.device
    run: str = "alone"
    generation: int = 0
    rejoins: bool = False
    """The site comes into a run that goes on."""
    averages: bool = True
    """The script means to average something over sites."""
    rank: int = field(default_factory=dist.get_rank)
    """Inside the site."""
    world_size: int = field(default_factory=dist.get_world_size)
    """Ranks of the site."""

    @property
    def site(self) -> str:
        """The site's name."""
        return self.welcome.site

    @property
    def index(self) -> int:
        """The site's position among the sites."""
        return self.welcome.site_index

    @property
    def num_sites(self) -> int:
        """How many sites the run may have."""
        return len(self.welcome.sites)

    @property
    def global_rank(self) -> int:
        """Among the ranks of all sites, in site order."""
        return sum(self.welcome.ranks_per_site[: self.index]) + self.rank

    @property
    def global_world_size(self) -> int:
        """Ranks of all sites."""
        return sum(self.welcome.ranks_per_site)

    @property
    def exchange_is_off(self) -> bool:
        """Whether each site trains for itself: `exchange.schedule: off`."""
        return self.spec.job.exchange.schedule == "off"

    @property
    def is_apart(self) -> bool:
        """Whether nothing crosses: there is one site, or each trains for itself."""
        return self.num_sites == 1 or self.exchange_is_off

    @property
    def must_average(self) -> bool:
        """Whether a script that ends without having averaged anything is mistaken."""
        return self.averages and not self.is_apart

    @property
    def late_sites(self) -> tuple[int, ...]:
        """Indexes of the sites that the run does not begin with."""
        late = {*self.spec.site_names} - {*self.spec.first_sites}
        return tuple(at for at, name in enumerate(self.welcome.sites) if name in late)
