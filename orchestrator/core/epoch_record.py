"""What is written down of a run's epochs, and what follows from it for its sites.

Part of the fold of a run's journal (journaled_run.py), which alone changes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.members import Member
from isthmus.topology.spec.epoch import Epoch, Finished, Handover, numbers_of
from isthmus.topology.spec.json_fields import read_json, to_json
from isthmus.topology.spec.run_spec import CodedPlan

ChunkSet = frozenset[tuple[int, int]]
"""Chunks of one round, by bucket and number."""


@dataclass(slots=True)
class EpochRecord:
    """The latest epoch that was written down, and the numbers of proposals."""

    epoch: Epoch
    number: int
    """The highest that any proposal has had."""
    handovers: tuple[Handover, ...] = ()
    rejoins: tuple[str, ...] = ()
    """The members that were none in the epoch before."""
    lost: dict[str, str] = field(default_factory=dict)
    """Members of the epoch before that were lost, and why, of whose loss nothing else is said."""
    leaving: set[str] = field(default_factory=set)
    """Sites that take part in rounds before the epoch's first one only, and have not ended."""
    older: CodedPlan | None = None
    """What rounds that come before the epoch's first one cross by; None: there are none."""
    cancelled: int = -1
    """The latest proposal that was cancelled."""
    is_unfinished: bool = False
    """Nothing has come of the latest proposal yet."""
    counted: dict[str, tuple[int, ChunkSet | None]] = field(default_factory=dict)
    """By site that went away in the middle of a round: the round, and which of its results contain
    the site's part; None: all, for it left after that round on purpose."""

    def apply(self, kind: str, detail: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        """Take an event of the journal."""
        match kind:
            case EventKind.EPOCH_PROPOSED | EventKind.EPOCH_ENTERING:
                self.number, self.is_unfinished = int(detail["epoch"]), True
            case EventKind.EPOCH_CANCELLED:
                self.is_unfinished, self.cancelled = False, self.number
            case EventKind.EPOCH_BEGUN:
                self._begin(detail, members)

    def _begin(self, detail: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        """Take a new epoch; `kept` is what is finished of its first round."""
        before, epoch = self.epoch, read_json(Epoch, detail["record"])
        kept, is_redo = read_json(tuple[Finished, ...], detail["kept"]), bool(detail["is_redo"])
        self.epoch, self.number, self.is_unfinished = epoch, epoch.number, False
        self.handovers = read_json(tuple[Handover, ...], detail["handovers"])
        self.lost = dict(detail.get("whys", dict.fromkeys(detail["lost"], detail["why"])))
        self.rejoins = tuple(name for name in epoch.members if name not in before.members)
        self.older = None if is_redo else before.reduction
        left = set(before.members) - set(epoch.members)
        self.leaving = set() if is_redo else left
        if is_redo:
            chunks = _chunks(kept)
            still = {
                site: (round_, chunks if its is None else its & chunks)
                for site, (round_, its) in self.counted.items()
                if round_ == epoch.from_round and (chunks if its is None else its & chunks)
            }
            self.counted = {**still, **dict.fromkeys(left, (epoch.from_round, chunks))}
        else:
            self.counted |= dict.fromkeys(left, (epoch.from_round - 1, None))
        for name in self.rejoins:
            members[name].since_round = epoch.from_round

    def unused(
        self, lost: Iterable[str], from_round: int, kept: tuple[Finished, ...]
    ) -> dict[str, int]:
        """Return by lost site the first round of which no result contains its data.

        A chunk that is finished contains the parts of all who were members when it was begun. Where
        sites that had finished it are lost before they could hand it over, it contains them no
        more, and those who were lost before count again.
        """
        first = from_round + bool(kept)
        unused = dict.fromkeys(lost, first)
        for site, (round_, counted) in self.counted.items():
            chunks = _chunks(kept) if counted is None else counted
            still = chunks & _chunks(kept) if from_round == round_ else ()
            if from_round <= round_ and not still:
                unused[site] = min(round_, first)
        return unused


def detail_of(
    epoch: Epoch,
    why: str,
    *,
    lost: Mapping[str, str] | None = None,
    leaves: Iterable[str] = (),
    unused: Mapping[str, int] | None = None,
    kept: tuple[Finished, ...] = (),
    handovers: tuple[Handover, ...] = (),
    is_redo: bool = False,
) -> dict[str, object]:
    """Return what is written down of an epoch that begins."""
    return {
        "epoch": epoch.number,
        "members": list(epoch.members),
        "lost": list(lost or {}),
        "whys": dict(lost or {}),
        "leaves": list(leaves),
        "from_round": epoch.from_round,
        "unused": dict(unused or {}),
        "kept": to_json(kept),
        "why": why,
        "plan": epoch.reduction.plan.why,
        "is_redo": is_redo,
        "record": to_json(epoch, _is_set),
        "handovers": to_json(handovers),
    }


def _chunks(kept: Iterable[Finished]) -> ChunkSet:
    return frozenset((each.bucket, chunk) for each in kept for chunk in numbers_of(each.runs))


def _is_set(field: dataclasses.Field[object], value: object) -> bool:
    return value != field.default
