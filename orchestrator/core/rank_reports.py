"""What ranks report while they train: compared over sites, noted, perhaps a failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.buffer_comparison import BufferComparison
from isthmus.orchestrator.core.event_kinds import EventKind, text_of
from isthmus.orchestrator.core.members import Member
from isthmus.orchestrator.core.non_finite_watch import NonFiniteWatch, note_of
from isthmus.orchestrator.core.parameter_digests import Difference, DigestComparison
from isthmus.orchestrator.core.run_events import RecordEvent, StorageFailed
from isthmus.orchestrator.core.same_data import SAME_INPUTS, SameDataWatch
from isthmus.orchestrator.core.stall_watch import StallWatch
from isthmus.orchestrator.core.step_comparison import StepComparison, StepEnd
from isthmus.protos.failure import Failure
from isthmus.topology.spec.world import Topology

NO_STATE = (
    "the script does not call `start = site.checkpoint(model, optimizer)`, by which a site takes over "
    "the others' state"
)
_FAILURE_NOTES = 8
"""Kinds of failures on storage that are noted; ranks' logs have all."""


@dataclass(slots=True)
class Progress:
    """What a run's script has done so far. The journal has all of it (journaled_run.py)."""

    has_state: bool = False
    """The script has what a site needs that comes back."""
    has_steps: bool = False
    """The script has taken a step: what it calls before that, it has called."""
    stepped: set[str] = field(default_factory=set)
    """The sites that have, as far as this coordinator has heard."""
    may_lose: bool = False
    """All sites have taken a step, so the run can go on without one."""
    saved_step: int = -1
    """The step of the last checkpoint that was written."""
    unsaved: StorageFailed | None = None
    """The last checkpoint that was not."""
    storage_failures: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    """By event, the kinds of failures on storage that have been noted, each of a site."""

    @property
    def lacks_state(self) -> bool:
        """Whether the script has taken steps, and has not what a site needs that comes back."""
        return self.has_steps and not self.has_state

    def note_unsaved(self, failed: StorageFailed) -> bool:
        """Remember a failure on storage; return whether it is of a kind that is not known yet."""
        if failed.kind == EventKind.CHECKPOINT_FAILED:
            self.unsaved = failed
        known = self.storage_failures.setdefault(failed.kind, set())
        kind = failed.site, re.sub(r"\d+", "", failed.reason)  # without steps and ranks
        if kind in known or len(known) >= _FAILURE_NOTES:
            return False
        known.add(kind)
        return True

    def checkpoint_problem(self, *, is_wanted: bool) -> str:
        """Return why the run's last checkpoint is not there; empty: it is, or none was wanted."""
        failed = self.unsaved
        if failed is not None and failed.step > self.saved_step:
            return (
                f"the last checkpoint, of step {failed.step}, failed at site {failed.site}: "
                f"{failed.reason}"
            )
        if self.saved_step >= 0 or not (is_wanted and self.has_steps):
            return ""
        return "no checkpoint was written" + ("" if self.has_state else f": {NO_STATE}")


class RankReports:
    """Compares what ranks of all sites report. Returns records, and failures that end the run."""

    def __init__(
        self, topology: Topology, progress: Progress, *, collect_s: float, refuses_same_data: bool
    ) -> None:
        """Begin with what no rank has reported anything of.

        `refuses_same_data`: sites that train on the same data end the run.
        """
        self._topology, self._progress = topology, progress
        self._refuses_same_data = refuses_same_data
        self._not_finite = NonFiniteWatch(collect_s)
        self.begin_again(())

    def begin_again(self, out: Collection[str]) -> None:
        """Forget all that was reported; nobody waits for the sites that are out."""
        sites = self._topology.sites
        self._digests = DigestComparison({site.name: site.num_ranks for site in sites})
        for name in out:
            self._digests.drop(name)
        self._stalls = StallWatch()
        self.steps = StepComparison()
        self._gradients, self._inputs = SameDataWatch(), SameDataWatch()
        self._buffers = BufferComparison()
        self._sampled: dict[str, str] = {}
        """Which site was the first to divide some data over its own ranks, by those data."""
        self._has_noted_sampler = False
        self._sampler: run_events.SamplerMade | None = None
        """The first that was made."""

    @property
    def verified_steps(self) -> int:
        """Steps after which the parameters of all ranks of all sites were seen to be equal."""
        return self._digests.verified_steps

    def recall(self, members: Collection[Member], verified_steps: int) -> None:
        """Go on as an earlier coordinator did."""
        for each in members:
            (self._digests.drop if each.is_outside else self._digests.regain)(each.name)
        self._digests.verified_steps = verified_steps

    # ------------------------------------------------------------ who takes part

    def drop(self, site: str, now_s: float) -> list[Failure]:
        """Wait for nothing of a site any more; what was held back for it may differ."""
        self._stalls.forget(site)
        self.steps.drop(site)
        difference = self._digests.drop(site)
        return [] if difference is None else [_differing(difference, now_s)]

    def forget_stalls(self, site: str) -> None:
        """The ranks of a site that may have hung are gone."""
        self._stalls.forget(site)

    def regain(self, site: str) -> None:
        """Compare a site again."""
        self._digests.regain(site)

    def flush(self, now_s: float) -> list[Failure]:
        """Return the difference that never was certain, now that nothing more comes."""
        difference = self._digests.flush()
        return [] if difference is None else [_differing(difference, now_s)]

    # ------------------------------------------------------------ what they report

    def take(
        self, event: run_events.RankReport, now_s: float, *, is_outside: bool, is_ending: bool
    ) -> Sequence[RecordEvent | Failure]:
        """Take a report of a site that may be out, in a run that may be ending."""
        match event:
            case run_events.DigestReported() if not is_ending:
                # Unlike steps explain unlike parameters.
                differing = [] if is_outside else self._take_end(event, now_s)
                return differing or self._take_digest(event, now_s)
            case run_events.StepEnded() if not (is_ending or is_outside):
                return self._take_end(event, now_s)
            case run_events.GradientReported() if not is_ending:
                return self._take_gradient(event, now_s)
            case run_events.SamplerMade() if not (is_ending or is_outside):
                return self._take_sampler(event, now_s)
            case run_events.SiteSampled() if not is_outside:
                return self._take_site_sampler(event)
            case run_events.BuffersReported() if not is_outside:
                note = self._buffers.report(event.site, event.step, event.hashes)
                detail = {"note": note, "step": event.step}
                return [RecordEvent(EventKind.BUFFERS_DIFFER, detail=detail)] if note else []
            case run_events.NonFiniteReported():
                return self._take_non_finite(event, now_s)
            case run_events.StateOffered():
                is_first, self._progress.has_state = not self._progress.has_state, True
                return [RecordEvent(EventKind.RUN_STATE_OFFERED)] if is_first else []
            case run_events.CheckpointWritten():
                return self._take_checkpoint(event)
            case run_events.StorageFailed():
                return self._take_storage(event)
            case run_events.SiteNoted():
                return [RecordEvent(event.kind, event.site, {"note": event.note})]
        return []

    def _take_end(
        self, event: run_events.StepEnded | run_events.DigestReported, now_s: float
    ) -> list[Failure]:
        """Fail the run where a step has taken other rounds at one site than at another."""
        end = StepEnd(event.site, event.rank, event.step, event.round)
        difference = None if event.round < 0 else self.steps.report(end)
        return [] if difference is None else [_failed("STEPS_DIFFER", str(difference), now_s)]

    def _take_digest(self, event: run_events.DigestReported, now_s: float) -> list[Failure]:
        """Fail the run where parameters differ; it names a place only where that is certain."""
        difference = self._digests.report(
            event.site, event.rank, event.step, event.combined, event.tensors, event.names
        )
        return [] if difference is None else [_differing(difference, now_s)]

    def _take_gradient(
        self, event: run_events.GradientReported, now_s: float
    ) -> list[RecordEvent | Failure]:
        """Warn of sites that train on the same data; end the run if they go on with it."""
        found = self._gradients.report(event.site, event.step, event.gradient_hash)
        if found is None:
            return self._take_inputs(event)
        if found.times > 1 and not self._refuses_same_data:
            return []
        if found.times > 1:
            return [_failed("SAME_DATA", str(found), now_s)]
        return [RecordEvent(EventKind.DATA_SAME, detail={"note": str(found), "step": found.step})]

    def _take_inputs(self, event: run_events.GradientReported) -> list[RecordEvent | Failure]:
        """Note sites whose inputs were the same in some steps. Their targets may be others."""
        found = self._inputs.report(event.site, event.step, event.input_hash)
        if found is None or found.times != SAME_INPUTS or self._gradients.has_found:
            return []
        note = (
            f"sites {' and '.join(found.sites)} called the model with the same inputs in {SAME_INPUTS} "
            f"steps, and had unlike gradients, as of dropout: unless that is meant, "
            "divide the data by site.sampler(dataset), or by site.global_rank and "
            "site.global_world_size"
        )
        return [RecordEvent(EventKind.DATA_SAME, detail={"note": note, "step": event.step})]

    def _take_site_sampler(self, event: run_events.SiteSampled) -> list[RecordEvent]:
        """Note sites that divide the same data over their own ranks, as far as its length says."""
        first = self._sampled.setdefault(event.data, event.site)
        if first == event.site or self._has_noted_sampler:
            return []
        self._has_noted_sampler = True
        one, other = sorted((first, event.site))
        note = (
            f"at sites {one} and {other} a DistributedSampler divides {event.data} over the ranks "
            "of its own site: unless each site has data of its own, they train on the same samples: "
            "give it num_replicas=site.global_world_size and rank=site.global_rank, or use "
            "site.sampler(dataset)"
        )
        return [RecordEvent(EventKind.DATA_SAME, detail={"note": note})]

    def _take_sampler(self, event: run_events.SamplerMade, now_s: float) -> list[Failure]:
        """Fail the run where a rank hands out samples of other data than the first one."""
        first = self._sampler = self._sampler or event
        if event.data == first.data:
            return []
        message = (
            f"site.sampler is for {first.data} at rank {first.rank} of site {first.site}, and for "
            f"{event.data} at rank {event.rank} of site {event.site}: some samples would be used "
            "twice, and others never"
        )
        return [_failed("DATA_DIFFERS", message, now_s)]

    def _take_non_finite(
        self, event: run_events.NonFiniteReported, now_s: float
    ) -> list[RecordEvent]:
        """Note a NaN or an infinity, with the one that explains it."""
        return _noted(self._not_finite.report(event, now_s))

    def explained(self, now_s: float) -> list[RecordEvent]:
        """Note a NaN or an infinity for which nothing has come that would explain it."""
        return _noted(self._not_finite.explained(now_s))

    def take_stall(
        self, event: run_events.StallReported, now_s: float
    ) -> list[tuple[RecordEvent, Failure]]:
        """Name each rank that hangs while others wait: its site cannot go on with it."""
        found = []
        for site, rank in self._stalls.report(
            event.site, event.absent, is_waiting=event.is_waiting, is_behind=event.is_behind
        ):
            message = (
                f"rank {rank.rank} of site {site} has not come for {rank.for_s:.1f} s, since round "
                f"{rank.round}: {rank.doing}"
            )
            detail = {
                "rank": rank.rank,
                "note": f"stalled: {message}",
                "stack_path": rank.stack_path,
            }
            failure = Failure(
                code="RANK_STALLED",
                message=message,
                at_s=now_s - rank.for_s,
                site=site,
                rank=rank.rank,
                log_path=rank.stack_path,
            )
            found.append((RecordEvent(EventKind.RANK_STALLED, site, detail), failure))
        return found

    def _take_checkpoint(self, event: run_events.CheckpointWritten) -> list[RecordEvent]:
        """Note a checkpoint that is written, once."""
        if event.step <= self._progress.saved_step:
            return []
        self._progress.saved_step = event.step
        note = f"checkpoint of step {event.step} is written"
        detail = {"step": event.step, "note": note}
        return [RecordEvent(EventKind.CHECKPOINT_WRITTEN, event.site, detail)]

    def _take_storage(self, event: StorageFailed) -> list[RecordEvent]:
        """Note what was not written, or not removed, of each kind once; nothing ends for it."""
        if not self._progress.note_unsaved(event):
            return []
        detail = {"step": event.step, "reason": event.reason}
        note = text_of(event.kind, event.site, detail)
        return [RecordEvent(event.kind, event.site, {**detail, "note": note})]


def _noted(found: run_events.NonFiniteReported | None) -> list[RecordEvent]:
    if found is None:
        return []
    detail = {
        "step": found.step,
        "rank": found.rank,
        "tensor": found.tensor,
        "note": note_of(found),
    }
    return [
        RecordEvent(EventKind.GRADIENT_NON_FINITE, found.site if found.rank >= 0 else "", detail)
    ]


def _failed(code: str, message: str, now_s: float) -> Failure:
    return Failure(code=code, message=message, at_s=now_s)


def _differing(difference: Difference, now_s: float) -> Failure:
    is_one_site = difference.is_majority and len(difference.sites) == 1
    is_one_rank = is_one_site and len(difference.replicas) == 1
    return Failure(
        code="PARAMETERS_DIFFER",
        message=str(difference),
        at_s=now_s,
        site=difference.sites[0] if is_one_site else "",
        rank=difference.replicas[0][1] if is_one_rank else -1,
    )
