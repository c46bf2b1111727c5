"""The parts of a `Site`, and how they are joined: each knows the parts that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from isthmus.protos import metrics
from isthmus.sites.worker.api.attachment import Attachment
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.checkpointing import Checkpointing
from isthmus.sites.worker.api.life import Life
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.api.rank_facts import RankFacts
from isthmus.sites.worker.api.records import Records
from isthmus.sites.worker.api.regimes import Regimes
from isthmus.sites.worker.api.rejoining import Rejoining
from isthmus.sites.worker.data.learning_rates import LearningRates
from isthmus.sites.worker.data.run_data import RunData
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.member_history import MemberHistory
from isthmus.sites.worker.exchange.missing_sites import notice_steps_of
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.exchange.rank_pace import RankPace
from isthmus.sites.worker.exchange.run_regime import RunRegime
from isthmus.sites.worker.exchange.step_records import StepLog, StepNumbers


@dataclass(frozen=True, slots=True)
class Parts:
    """What does the work of one `Site`."""

    rank: Rank
    averaging: Averaging
    regimes: Regimes
    attachment: Attachment
    rates: LearningRates
    data: RunData
    checkpointing: Checkpointing
    life: Life

    @classmethod
    def of(cls, context: RankContext, link: Link, *, owns_group: bool) -> Self:
        """Make all parts. With `owns_group`, the process group ends with the rank's life."""
        missing_sites = link.missing_sites
        regime = RunRegime(context.spec)
        missing_sites.notice_steps = notice_steps_of(regime.longest)
        records = Records(link)
        steps = StepLog(
            link,
            sends=context.rank == 0,
            timeline_every=context.spec.job.timeline_every,
            # Sites hold the same where a round has landed.
            verify_every=context.welcome.verify_every * regime.now.sync_every,
            rejoins=context.rejoins,
            pace=RankPace(
                link.send,
                rank=context.rank,
                num_ranks=context.world_size,
                read_facts=RankFacts(context.device),
            ),
        )
        rank = Rank(
            context=context,
            link=link,
            members=MemberHistory(context.site, rejoins=context.rejoins),
            steps=steps,
            numbers=StepNumbers(steps),
            records=records,
            regime=regime,
        )
        averaging = Averaging(rank)
        regimes = Regimes(rank, averaging)
        attachment = Attachment(rank, averaging, regimes)
        rates = LearningRates()
        data = RunData(
            context,
            missing_sites,
            rates,
            attachment.tokens,
            lambda kind, data: records.record(kind, 0, {}, {metrics.DATA: data}),
            regime,
        )
        steps.own_values = lambda: {
            **(data.values() if steps.counts else {}),
            **regimes.values(),
        }
        rejoining = Rejoining(rank, averaging, data, regimes)
        checkpointing = Checkpointing(rank, averaging, regimes, attachment, data, rates, rejoining)
        attachment.before_change = checkpointing.before_change
        for listener in (  # in this order at the end of each step
            checkpointing.check_not_stale,
            attachment.end_step,
            lambda step: data.end_step(step, steps.landing),
            rejoining.end_step,
            data.scale_rates,
        ):
            steps.listen(listener)

        def end_group() -> None:
            if owns_group and dist.is_initialized():
                dist.destroy_process_group()

        life = Life(
            context,
            link,
            rank.members,
            has_averaged=lambda: averaging.has_begun,
            before=[regimes.finish, checkpointing.finish, steps.flush],
            after=[attachment.close, averaging.close, end_group],
        )
        return cls(rank, averaging, regimes, attachment, rates, data, checkpointing, life)
