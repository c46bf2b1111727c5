"""Gradients of one micro-batch are compared in all regimes, and that changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.protos import metrics
from tests.fakes.two_sites import bits, bits_of, run
from tests.sites.worker_programs import train_compared, train_compared_beside_shards

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

LOCAL = ["regime.sync_every=2", "regime.outer.ramp_steps=0"]
REGIMES = {
    "sync": [],
    "delayed": ["regime.kind=delayed"],
    "local_sgd": ["regime.kind=local_sgd", LOCAL[0]],
    "diloco": ["regime.kind=diloco", *LOCAL],
    "streaming": ["regime.kind=streaming", *LOCAL, "regime.fragments=2"],
}
QUICK = ("sync", "diloco")


@pytest.mark.parametrize(
    "kind",
    [
        each if each in QUICK else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in REGIMES
    ],
)
def test_ranks_compare_and_train_as_without(tmp_path: Path, kind: str) -> None:
    found = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        job = [*REGIMES[kind], f"verify.gradients_every={every}"]
        saved, gateways = run(folder, train_compared, (1, 2), job=job)
        found.append(saved)
        told = [each for _, _, each in gateways.metrics if each["kind"] == metrics.GRADIENTS]
        steps = range(*((2, 9, 2) if LOCAL[0] in job else (1, 9)))
        wanted = sorted([*steps] * 2) if every else []
        assert sorted(each["step"] for each in told) == wanted
        assert {each["values"][metrics.COMPARED_RANKS] for each in told} <= {3.0}
    for name, state in found[0].items():
        assert bits_of(state["final"]) == bits_of(found[1][name]["final"]), name
        assert bits(state["next"]) == bits(found[1][name]["next"]), name


def test_beside_a_site_that_shards_its_model_rounds_still_pair_and_people_are_told(
    tmp_path: Path,
) -> None:
    found = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        job = [f"verify.gradients_every={every}"]
        saved, gateways = run(folder, train_compared_beside_shards, (1, 2), job=job)
        found.append(saved)
        kinds = [(site, each["kind"]) for site, _, each in gateways.metrics]
        assert kinds.count(("site1", metrics.TROUBLE)) == every
        assert metrics.GRADIENTS not in [kind for _, kind in kinds], "one rank can compute"
    for name, state in found[0].items():
        assert bits_of(state["final"]) == bits_of(found[1][name]["final"]), name
