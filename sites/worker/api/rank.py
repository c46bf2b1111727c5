"""What all parts of a `Site` share."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.sites.worker.api.records import Records
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.member_history import MemberHistory
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.exchange.run_regime import RunRegime
from isthmus.sites.worker.exchange.step_records import StepLog, StepNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Who this rank is, what it hears, and what it tells others."""

    context: RankContext
    link: Link
    """To the gateway."""
    members: MemberHistory
    steps: StepLog
    numbers: StepNumbers
    """The numbers that `Site.steps` gives to a script."""
    records: Records
    regime: RunRegime
