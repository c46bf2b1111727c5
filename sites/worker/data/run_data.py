"""The data of a run at one rank: its sampler, and what lost and rejoining sites mean for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.data.data_part import part_of, sampled_by_site
from isthmus.sites.worker.data.data_positions import DataPositions
from isthmus.sites.worker.data.learning_rates import LearningRates
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.exchange.rounds import Landing
from isthmus.sites.worker.exchange.run_regime import RunRegime
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.topology.spec.batch_rule import FullBatch
from isthmus.topology.spec.shares import Shares

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RunData:
    """Keeps a sampler, if the script has one, in step with the run. For the training thread."""

    def __init__(
        self,
        context: RankContext,
        missing_sites: MissingSites,
        rates: LearningRates,
        tokens: TokenCount,
        report: Callable[[str, str], None],
        regime: RunRegime,
    ) -> None:
        """Have no sampler yet. `tokens` weighs each step; `report` gets metrics."""
        self._context = context
        self._missing_sites = missing_sites
        self._rates = rates
        self._tokens = tokens
        self._report = report
        self._is_divided = False
        """Sites have data of their own, as far as this script says, or it was looked for that."""
        self._sampled = ""
        """What all ranks of all sites have to have made it for."""
        self._regime = regime
        self._sampler: Sampler | None = None
        self._is_shared = False
        """The sampler divides the job's batch, and not one of the script's own."""
        self._divided = 0
        """The number of the latest division whose step is known."""

    def make_sampler(
        self, num_samples: int, *, global_batch: int | None, seed: int, data_mesh: DeviceMesh | None
    ) -> Sampler:
        """Return this rank's batches of a dataset of so many samples: `Site.sampler`.

        Raises:
            ValueError: the dataset is empty, or there is not a sample for each rank.
            RuntimeError: there is a sampler already.
        """
        if self._sampler is not None:
            raise RuntimeError("site.sampler: there is one already")
        context, job = self._context, self._context.spec.job
        ranks = context.welcome.ranks_per_site
        size = job.global_batch if global_batch is None else global_batch
        if data_mesh is None and size < context.global_world_size:
            raise ValueError(
                f"site.sampler: a global batch of {size} for {context.global_world_size} ranks: want "
                "at least a sample for each"
            )
        sequences = {each.site: each.sequences for each in job.placement}
        names = context.welcome.sites if global_batch is None else ()
        sharing = None if data_mesh is None else data_mesh.mesh.flatten().tolist()
        late = context.late_sites
        first_ranks = sum(each for at, each in enumerate(ranks) if at not in late)
        sampler = Sampler(
            num_samples=num_samples,
            shares=BatchShares(
                full=FullBatch(size, first_ranks),
                rule=job.on_fewer_sites,
                rate=job.rate,
                ranks=ranks,
                sequences=tuple(sequences[each] for each in names) if sequences else (),
                later=frozenset(late),
            ),
            site=context.index,
            rank=context.rank if sharing is None else sharing.index(context.rank),
            replicas=None if sharing is None else len(sharing),
            seed=seed,
            notice_steps=self._missing_sites.notice_steps,
            **({"most_ahead": 0} if self._regime.now.is_open else {}),
        )
        if not context.rejoins:
            sampler.begin_without(late)
        self._tokens.of_batch = sampler.weight
        self._sampled = f"{num_samples} samples, a global batch of {size} and seed {seed}"
        self._report(metrics.SAMPLER, self._sampled)
        self._sampler, self._is_shared = sampler, global_batch is None
        return sampler

    def part_of(self, dataset: Any) -> Any:  # noqa: ANN401 - any map-style dataset
        """Return a view of a dataset that has this site's part: `Site.part_of`."""
        self._is_divided = True
        return part_of(dataset, self._context.welcome.ranks_per_site, self._context.index)

    # ---------------------------------------------------------------- steps

    def end_step(self, step: int, landing: Landing | None = None) -> None:
        """Count a step: who took part in it, and which samples it has used.

        `landing`: with it a round has ended that waited for nobody.
        """
        if not self._is_divided and self._sampler is None and self._context.rank == 0:
            self._is_divided, sizes = (
                True,
                (self._context.world_size, self._context.global_world_size),
            )
            if sizes[0] < sizes[1] and (data := sampled_by_site(*sizes)):
                self._report(metrics.SITE_SAMPLER, data)
        if landing is None:
            self._missing_sites.end_step(has_landed=self._regime.now.lands_at(step))
        elif not landing.is_passed_over:  # else that was noted when it ended
            self._missing_sites.end_step(num_steps=landing.num_steps, round_=landing.round)
        if self._sampler is not None:
            self._sampler.lose(self._missing_sites.absent())
            if landing is None:
                self._sampler.step()
            else:
                self._sampler.end_round(self._regime.now.sync_every, landing.taken)

    def scale_rates(self, _: int = 0) -> None:
        """Have learning rates go with the batch of those sites that take part in the next step.

        Where sites take steps of their own, each one's batch is what it was.
        """
        if self._sampler is not None and not self._regime.now.is_local:
            gone = self._missing_sites.gone()
            self._rates.scale_to(self._sampler.shares.batch(gone).learning_rate_scale)

    # ---------------------------------------------------------------- sites that rejoin

    def notice_steps(self, sites: Iterable[int]) -> int | None:
        """Return after how many steps sites may take part again at the earliest.

        None: there is no sampler, so at once.
        """
        return None if self._sampler is None else self._sampler.notice_steps(sites)

    @property
    def num_ahead(self) -> int:
        """Number of batches that the script's data loader has fetched for later steps."""
        return 0 if self._sampler is None else self._sampler.num_ahead

    def regain(self, site: int, step: int) -> None:
        """Hand out samples to a site again from a step on."""
        if self._sampler is not None:
            self._sampler.regain(site, step)

    def divide(self, step: int, shares: Shares) -> None:
        """Give sites other parts of the batch from a step on; not where the script has its own."""
        self._divided = shares.number
        if self._is_shared and self._sampler is not None:
            self._sampler.divide(step, shares.parts)

    def values(self) -> dict[str, float]:
        """Return what a step's record has of the data; nothing: they are the script's affair."""
        num_own = self._sampler.num_own if self._is_shared and self._sampler is not None else 0
        return {metrics.SITE_SAMPLES: float(num_own)} if num_own else {}

    def give_up(self, site: int, step: int) -> None:
        """Do without a site that was to have samples again from a step on."""
        if self._sampler is not None:
            self._sampler.give_up(site, step)

    # ---------------------------------------------------------------- the place in the data

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest has of the data; empty: there is no sampler."""
        if self._sampler is None:
            return {}
        self._sampler.lose(self._missing_sites.absent())
        return {
            **self._sampler.used.to_json(),
            "full_ranks": self._sampler.shares.full.ranks,
            "learning_rate_scale": self._rates.scale,
            "divisions": self._sampler.divisions(),
            "sites": self._context.welcome.sites,
        }

    def state_for_rejoining(self) -> dict[str, Any]:
        """Return the place in the data for a site that rejoins: what all ranks have yet to do."""
        found = self.state()
        if self._sampler is not None:
            absent = self._missing_sites.absent_before()
            found |= {
                **self._sampler.handed_out(),
                "absent": absent,
                "sampled": self._sampled,
                "divided": self._divided,
            }
        return found

    def resume(self, data: Mapping[str, Any], before_first: Callable[[], None]) -> None:
        """Go on after the positions that were used, with the batch for as many ranks as now.

        `data` is of `state` or of `state_for_rejoining`. `before_first` is called before the first
        batch is drawn. Without a sampler, or without data, nothing happens.

        Raises:
            ScriptError: this rank's sampler is for other data than those of the run that goes on.
        """
        if self._sampler is None or not data:
            return
        if (sampled := data.get("sampled", self._sampled)) != self._sampled:
            raise ScriptError(
                f"site.sampler is for {self._sampled} at this site, which comes back to a run whose "
                f"other sites have {sampled}: give it the same dataset, global_batch and seed"
            )
        absences = data.get("absences", ())
        self._sampler.resume(DataPositions.from_json(data), before_first, absences)
        self._missing_sites.begin_amid(data.get("absent", ()))
        if tuple(data.get("sites", ())) == self._context.welcome.sites:
            for step, parts in data["divisions"]:
                self._sampler.divide(step, parts)
        self._divided = data.get("divided", 0)
        shares = self._sampler.shares
        if not shares.sequences:  # a placement has each site's part of the batch
            full = FullBatch(shares.full.samples, data["full_ranks"])
            self._sampler.shares = replace(shares, full=full)
        self._rates.scale = data["learning_rate_scale"]
        self.scale_rates()
