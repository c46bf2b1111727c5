"""What has failed in a run: what befell one site, which it may survive, and what ends the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.first_failure import detail_of, failure_of, first_failure
from isthmus.orchestrator.core.members import Absence, Contact, Member, Stage
from isthmus.orchestrator.core.policy import losable_failures
from isthmus.orchestrator.core.rank_reports import Progress
from isthmus.orchestrator.core.run_end import Ending
from isthmus.orchestrator.core.run_events import CannotGoOn, RecordEvent
from isthmus.protos.failure import Failure
from isthmus.topology.spec.world import Detection


@dataclass(slots=True)
class Failures:
    """What the journal says of failures."""

    members: Mapping[str, Member]
    progress: Progress
    ending: Ending = field(default_factory=Ending)
    is_active: bool = False
    """All sites have come up, and none were told to stop."""

    @property
    def is_going_on(self) -> bool:
        """Whether the run is active, and nothing is known that will end it."""
        return self.is_active and not self.ending.has_begun

    @property
    def losses(self) -> list[Failure]:
        """What befell the sites that have taken part."""
        begun = [site for site in self.members.values() if site.has_taken_part]
        return [failure for site in begun for failure in site.losses]

    def apply(self, kind: str, detail: Mapping[str, Any], at_s: float) -> None:
        """Take an event of the journal."""
        if kind == EventKind.RUN_FAILING:
            for name in detail["sites"]:
                for loss in self.members[name].losses:
                    self.ending.fail(loss, at_s)
            return
        failure = replace(failure_of(detail), at_s=at_s - float(detail.get("age_s", 0.0)))
        if detail.get("is_loss", self.is_going_on and self.progress.may_lose):
            if site := self.members.get(failure.reported_by or failure.site):
                site.losses.append(failure)
                site.add_fault(failure)
        else:
            self.ending.fail(failure, at_s, is_last=bool(detail.get("is_last")))


class FailureReports:
    """Tells losses of sites from the end of the run."""

    def __init__(
        self,
        record: Failures,
        contacts: Mapping[str, Contact],
        rules: Detection,
        *,
        drops_corrupt: bool,
    ) -> None:
        """`rules` say what the run survives where all sites have taken a step.

        `drops_corrupt`: a site that computes wrongly, too.
        """
        self._record, self._contacts = record, contacts
        self._losable = losable_failures(rules, drops_corrupt=drops_corrupt)

    def fail(
        self,
        code: str,
        message: str,
        now_s: float,
        *,
        at_s: float | None = None,
        site: str = "",
        log_path: str = "",
        is_last: bool = False,
    ) -> Iterator[RecordEvent]:
        """Note a failure that the coordinator itself found: now, unless it says `at_s`."""
        at_s = now_s if at_s is None else at_s
        failure = Failure(code=code, message=message, at_s=at_s, site=site, log_path=log_path)
        yield from self.take((failure,), now_s, is_last=is_last)

    def take(
        self, failures: Sequence[Failure], now_s: float, *, is_last: bool = False
    ) -> Iterator[RecordEvent]:
        """Note failures that came together: of a site, where the run may survive them all."""
        real = [each for each in failures if not each.is_collateral]
        is_loss = self._record.is_going_on and self._record.progress.may_lose
        is_loss &= all(each.code in self._losable and each.site for each in real)
        if failures and not is_loss and not self._record.ending.has_begun:
            yield from self._blame_losses()
        for each in failures:
            yield self._reported(each, now_s, is_loss=is_loss, is_last=is_last)

    def take_found(
        self, found: Sequence[RecordEvent | Failure], now_s: float
    ) -> Iterator[RecordEvent]:
        """Note failures among records, one by one."""
        for each in found:
            if isinstance(each, Failure):
                yield from self.take((each,), now_s)
            else:
                yield each

    def cannot_go_on(self, event: CannotGoOn, now_s: float) -> Iterator[RecordEvent]:
        """End the run, for the first of what befell its sites."""
        # Sites with unlike results are not explained by one that is silent.
        if event.code != "PARAMETERS_DIFFER":
            yield from self._blame_losses()
        if self._record.ending.has_begun:
            return
        failure = Failure(code=event.code, message=event.why, at_s=now_s)
        if self._record.losses and event.code == "SITE_LOST":
            failure = first_failure(self._record.losses)
        yield self._reported(failure, now_s, is_loss=False, is_last=True)

    def _blame_losses(self) -> Iterator[RecordEvent]:
        """What befell sites that are not out yet may explain what ends the run."""
        members = self._record.members.values()
        lost = [site for site in members if site.losses and not site.is_outside]
        if lost:
            yield RecordEvent(EventKind.RUN_FAILING, detail={"sites": [site.name for site in lost]})
        for site in lost:
            is_silent = Absence.SILENT in self._contacts[site.name].absences
            if is_silent or site.stage is Stage.LOST:
                yield RecordEvent(
                    EventKind.SITE_LOST, site.name, {"message": site.losses[0].message}
                )

    def _reported(
        self, failure: Failure, now_s: float, *, is_loss: bool, is_last: bool
    ) -> RecordEvent:
        """Return the record of a failure."""
        stopped_s = self._record.ending.stopped_s
        if stopped_s is not None and failure.at_s > stopped_s:  # it follows from that
            failure = replace(failure, is_collateral=True)
        told = {"age_s": now_s - failure.at_s, "is_loss": is_loss, "is_last": is_last}
        return RecordEvent(EventKind.FAILURE_REPORTED, failure.site, {**detail_of(failure), **told})
