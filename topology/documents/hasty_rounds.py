"""Finds rounds that are valid, and yet too short for their outer optimizer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.text.yaml_document import read_with_overrides


def hasty_rounds(text: str, source: str, overrides: Sequence[str], job: Job) -> list[Problem]:
    """Return a warning if rounds of one step have outer momentum; `job` is that of `text`."""
    regime = job.regime
    if not regime.is_local or regime.sync_every > 1 or regime.full_momentum == 0:
        return []
    message = (
        f"rounds of one step with outer momentum {regime.full_momentum:g} train worse than any "
        "longer ones (arXiv 2503.09799, figure 9): want 10 steps or more, or kind: sync"
    )
    document = read_with_overrides(text, source, overrides)
    return [document.problem(("regime", "sync_every"), message, is_warning=True)]
