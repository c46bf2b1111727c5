"""Compares in which round each optimizer step ended, over all ranks of all sites.

Rounds are paired by their numbers. So a site that takes a step less than others for the same rounds
averages its gradients of one step with theirs of another from then on, and its parameters differ.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_STEPS = 256
"""The newest steps of which it is known in which round they ended."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A rank's optimizer step, and the last round in which its gradients crossed."""

    site: str
    rank: int
    step: int
    round: int

    def __str__(self) -> str:
        return f"at site {self.site} (rank {self.rank}) it ended with round {self.round}"


@dataclass(frozen=True, slots=True)
class StepsDiffer:
    """A step that took other rounds at one rank than at another."""

    one: StepEnd
    other: StepEnd

    def __str__(self) -> str:
        first, second = sorted((self.one, self.other), key=lambda each: each.round)
        return (
            f"sites are not at the same step: of step {first.step}, {first}, and {second}. Site "
            f"{second.site} has taken fewer steps for as many rounds: one of both skipped a batch "
            "after its backward pass, steps its optimizer less often, accumulates gradients over "
            "another number of batches, or evaluates a closure more often"
        )


class StepComparison:
    """Compares the steps of all ranks. Pure: steps in, at most one difference out.

    Which step ends in which round is the same for all, whenever they come to it. So a report may
    come late, twice, or from before an epoch; and a site that comes back goes on with the others'
    steps and rounds.
    """

    def __init__(self) -> None:
        self._known: dict[int, StepEnd] = {}
        """By step, who told of it first."""
        self._newest = -1
        self._latest: dict[str, StepEnd] = {}
        """The newest step of each site."""

    def report(self, end: StepEnd) -> StepsDiffer | None:
        """Take the end of a rank's step; return how it differs from what is known of that step."""
        latest = self._latest.get(end.site)
        if latest is None or latest.step < end.step:
            self._latest[end.site] = end
        known = self._known.get(end.step)
        if known is not None:
            return StepsDiffer(known, end) if known.round != end.round else None
        if end.step <= self._newest - WINDOW_STEPS:
            return None
        self._newest = max(self._newest, end.step)
        self._known[end.step] = end
        while len(self._known) > WINDOW_STEPS:
            del self._known[min(self._known)]
        return None

    def early_end(self, site: str, last_round: int, by: str, by_round: int) -> str:
        """Return a sentence: a site has ended, another is in a later round. By steps, if known."""
        last, latest = self._latest.get(site), self._latest.get(by)
        if last is None or last.round > last_round:
            return f"site {site} ended after round {last_round}; site {by} is in round {by_round}"
        step = max(last.step, latest.step if latest is not None else 0) + 1
        return f"site {site} ended after {last.step} steps; site {by} is at step {step}"

    def drop(self, site: str) -> None:
        """Compare nobody with what a site said that takes part no more."""
        self._latest.pop(site, None)
        self._known = {step: end for step, end in self._known.items() if end.site != site}
