"""What has failed in a run: what befell one site, which may be survived, and what ends the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.members import Member, Stage
from isthmus.orchestrator.core.rank_reports import Progress
from isthmus.orchestrator.core.run_end import LOSES_SITE, Ending
from isthmus.orchestrator.core.run_events import Action, CannotGoOn, RecordEvent
from isthmus.protos.failure import Failure


@dataclass(slots=True)
class Failures:
    """Tells losses of sites from the end of the run."""

    members: Mapping[str, Member]
    progress: Progress
    losable: frozenset[str] = LOSES_SITE
    """Codes of what the run survives where all sites have taken a step."""
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
    ) -> list[Action]:
        """Note a failure that the coordinator itself found: now, unless it says `at_s`."""
        at_s = now_s if at_s is None else at_s
        failure = Failure(code=code, message=message, at_s=at_s, site=site, log_path=log_path)
        return self.take((failure,), now_s, is_last=is_last)

    def take(
        self, failures: Sequence[Failure], now_s: float, *, is_last: bool = False
    ) -> list[Action]:
        """Note failures that came together: of a site, where the run may survive them all."""
        real = [each for each in failures if not each.is_collateral]
        is_loss = self.is_going_on and self.progress.may_lose
        is_loss &= all(each.code in self.losable and each.site for each in real)
        actions: list[Action] = []
        if failures and not is_loss and not self.ending.has_begun:
            actions += self.blame_losses(now_s)
        for each in failures:
            actions.append(self._reported(each, now_s, is_loss=is_loss, is_last=is_last))
        return actions

    def _reported(
        self, failure: Failure, now_s: float, *, is_loss: bool, is_last: bool
    ) -> RecordEvent:
        """Note a failure. What breaks after the sites were told to stop follows from that."""
        stopped_s = self.ending.stopped_s
        if stopped_s is not None and failure.at_s > stopped_s:
            failure = replace(failure, is_collateral=True)
        told = {"age_s": now_s - failure.at_s, "is_loss": is_loss, "is_last": is_last}
        detail = {**failure.to_json(), **told}
        self.apply("failure.reported", detail, now_s)
        return RecordEvent("failure.reported", failure.site, detail)

    def apply(self, kind: str, detail: Mapping[str, Any], at_s: float) -> None:
        """Take an event of the journal."""
        if kind == "run.failing":
            for name in detail["sites"]:
                for loss in self.members[name].losses:
                    self.ending.fail(loss, at_s)
            return
        failure = replace(Failure.from_json(detail), at_s=at_s - float(detail.get("age_s", 0.0)))
        if detail.get("is_loss", self.is_going_on and self.progress.may_lose):
            if site := self.members.get(failure.reported_by or failure.site):
                site.losses.append(failure)
        else:
            self.ending.fail(failure, at_s, is_last=bool(detail.get("is_last")))

    def take_found(self, found: Sequence[RecordEvent | Failure], now_s: float) -> list[Action]:
        """Note failures among records, one by one."""
        actions: list[Action] = []
        for each in found:
            actions += self.take((each,), now_s) if isinstance(each, Failure) else [each]
        return actions

    def blame_losses(self, now_s: float) -> list[Action]:
        """What befell sites that are not out yet may explain what ends the run."""
        lost = [each for each in self.members.values() if each.losses and not each.is_out]
        if not lost:
            return []
        detail = {"sites": [site.name for site in lost]}
        self.apply("run.failing", detail, now_s)
        actions: list[Action] = [RecordEvent("run.failing", detail=detail)]
        for site in lost:
            if site.silent or site.stage is Stage.LOST:
                message = site.losses[0].message
                site.stage, site.gone = Stage.LOST, site.gone or message
                site.become_outside_again()
                actions.append(RecordEvent("site.lost", site.name, {"message": message}))
        return actions

    def cannot_go_on(self, event: CannotGoOn, now_s: float) -> list[Action]:
        """End the run, for the first of what befell its sites."""
        # Sites with unlike results are not explained by one that is silent.
        explains = event.code != "PARAMETERS_DIFFER"
        actions = self.blame_losses(now_s) if explains else []
        if self.ending.has_begun:
            return actions
        failure = Failure(code=event.code, message=event.why, at_s=now_s)
        if self.losses and event.code == "SITE_LOST":
            failure = first_failure(self.losses)
        return [*actions, self._reported(failure, now_s, is_loss=False, is_last=True)]
