"""Finds rounds that are valid, and yet too short, or of which the last one never ends. Pure."""

from __future__ import annotations

from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.text.yaml_document import Document


def round_problems(document: Document, job: Job) -> list[Problem]:
    """Return warnings of the regime's rounds; `job` is the document's."""
    regime, steps = job.regime, job.trainer.steps
    if not regime.is_local:
        return []
    messages = []
    if regime.sync_every == 1 and regime.full_momentum > 0:
        messages.append(
            f"rounds of one step with outer momentum {regime.full_momentum:g} train worse than any "
            "longer ones (arXiv 2503.09799, figure 9): want 10 steps or more, or kind: sync"
        )
    if job.entrypoint is None and steps % regime.sync_every:
        messages.append(
            f"trainer.steps is {steps}, and rounds have {regime.sync_every} steps: the last "
            f"{steps % regime.sync_every} are in no round, so nobody evaluates or saves them"
        )
    path = ("regime", "sync_every")
    return [document.problem(path, each, is_warning=True) for each in messages]
