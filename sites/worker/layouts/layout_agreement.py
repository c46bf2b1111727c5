"""How sites that shard their models agree in which order tensors cross, and who has what of them.

Each site tells all others of its tensors once, before the first step; the first site's list is law.
A site that rejoins reads the lists with the others' state.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch.distributed as dist

from isthmus.protos.errors import LayoutMismatchError
from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.worker.exchange.agreement import tell_all
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Collectives, Ranks
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.layouts.agreed_hook import AgreedTensors
from isthmus.sites.worker.layouts.canonical import (
    Agreed,
    GradientPlan,
    SiteList,
    SiteTensors,
    check_alike,
    rank_major_names,
)
from isthmus.sites.worker.layouts.sharded_state import ShardedState, held_tensors


class LayoutAgreement:
    """One rank's part in agreeing how tensors cross."""

    def __init__(
        self,
        hook: AgreedTensors,
        collectives: Collectives,
        context: RankContext,
        exactness: Exactness,
        *,
        is_own: bool,
    ) -> None:
        """Hear what the ranks of this site hold. A collective of the site.

        Args:
            hook: prepares for what all have agreed on.
            collectives: make the process groups that follow from it.
            context: of this rank.
            exactness: which gradients cross as float32.
            is_own: this site agrees with itself alone.

        Raises:
            TypeError: what they hold does not make a model.
        """
        welcome, own_ranks = context.welcome, context.world_size
        self.hook = hook
        self._collectives = collectives
        self._device = context.device
        self._site = context.site
        self._sites: Sequence[str] = (context.site,) if is_own else welcome.sites
        """Those that tell each other, in order, this one among them."""
        self._ranks_per_site = (own_ranks,) if is_own else welcome.ranks_per_site
        self._ranks_per_gateway = welcome.ranks_per_gateway or own_ranks
        """How many of this site's ranks a gateway serves."""
        self._bucket_numel = max(1, context.spec.job.exchange.bucket_bytes // FLOAT_BYTES)
        lone_rank = dist.get_rank() if hook.is_lone else None
        self.tensors = SiteTensors.gather(held_tensors(hook.own, exactness, lone_rank=lone_rank))
        self.lists: Sequence[bytes] = ()
        """What each site has told all others; nothing of one that was lost."""
        self.cut = 0
        """Tells apart how all are cut into buckets, and which ranks share each."""
        self.plan: tuple[Agreed, GradientPlan] | None = None
        """What the sites have agreed on, and how gradients cross by it, once they have."""
        self._state: ShardedState | None = None

    @property
    def state(self) -> ShardedState:
        """The tensors of this rank, once the sites have agreed."""
        assert self._state is not None, "adopt comes first"
        return self._state

    def agree(self, pipeline: BucketPipeline) -> None:
        """Tell all other sites of this one's tensors, and adopt what follows. From all ranks.

        Raises:
            IsthmusError: as `adopt`, or the exchange failed.
        """
        told = tell_all(
            pipeline,
            self.tensors.to_bytes(),
            site=self._sites.index(self._site),
            num_sites=len(self._sites),
            rank=dist.get_rank(),
            device=self._device,
        )
        self.adopt(told)

    def adopt(self, lists: Sequence[bytes]) -> None:
        """Adopt the first site's list. `lists` are of all sites, empty of one that was lost.

        A collective of the site. A site that rejoins has to be as the others know it.

        Raises:
            LayoutMismatchError: this site's tensors, or another's, are not those of the law.
            TypeError: a rank shares data with unlike groups of ranks.
        """
        if not lists:
            raise LayoutMismatchError(
                f"site {self._site} trains with fully_shard, and the others do not"
            )
        self.lists = lists
        told = {
            name: SiteList.from_bytes(data)
            for name, data in zip(self._sites, lists, strict=True)
            if data
        }
        first, law = next(iter(told.items()))
        for name, each in told.items():
            check_alike(name, each.entries, first, law.entries)
        check_alike(self._site, self.tensors.entries, first, law.entries)
        self._check_stages(told.get(self._site))
        agreed = Agreed(
            law.entries,
            self.tensors,
            tuple(told[name].ranks_of() if name in told else {} for name in self._sites),
            self._ranks_per_site,
            self._ranks_per_gateway,
            rank_major_names(self._site, self.tensors, [told.get(name) for name in self._sites]),
        )
        plan = agreed.gradient_plan(self._bucket_numel, dist.get_rank())
        self.plan, self.cut = (agreed, plan), plan.identity
        sharing = self.hook.agree(agreed, plan)
        self._state = ShardedState(agreed, self.hook.own, self.hook.twins)
        self._prepare_groups(self.hook.data_ranks, sharing | self._state.groups)

    def _check_stages(self, own: SiteList | None) -> None:
        """Compare which ranks have what with what this site has told, maybe in an earlier life.

        Raises:
            LayoutMismatchError: they are others.
        """
        ranks_of = self.tensors.ranks_of()
        everybody = dict.fromkeys(ranks_of, tuple(range(dist.get_world_size())))
        known = everybody if own is None else own.ranks_of()
        if ranks_of != known:
            name = next(name for name in ranks_of if ranks_of[name] != known[name])
            if own is None:
                raise LayoutMismatchError(
                    f"site {self._site} has {name} on ranks {list(ranks_of[name])} only, and the "
                    "others have never heard of its pipeline stages: a site that is added later "
                    "has each tensor on all of its ranks, by fully_shard or tensor parallelism"
                )
            raise LayoutMismatchError(
                f"site {self._site} comes back with {name} on ranks {list(ranks_of[name])}, and "
                f"the others know it on ranks {list(known[name])}: come back with the pipeline "
                "stages that the run began with"
            )

    def _prepare_groups(self, data_ranks: Ranks, sharing: Set[Ranks]) -> None:
        """Make the process groups of ranks that share data, or a bucket. A collective of the site.

        Raises:
            TypeError: a rank shares data with unlike groups of ranks.
        """
        found: list[Ranks] = [()] * dist.get_world_size()
        dist.all_gather_object(found, data_ranks)
        groups = sorted(set(found))
        if sorted(rank for group in groups for rank in group) != [*range(len(found))]:
            raise TypeError(
                f"site.attach: ranks with data of their own are {groups}: want each rank of "
                "the site in just one of them; name them with data_mesh"
            )
        self._collectives.make_groups(sorted({*groups, *sharing}))
