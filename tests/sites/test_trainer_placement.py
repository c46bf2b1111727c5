"""A placement spreads the batch unevenly, and the training is still what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import JOB as JOB_TEXT
from tests.fakes.ranks import run_ranks
from tests.sites import trainer_programs as programs
from tests.sites.test_trainer_sites import STEPS, write_texts


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.multiprocess
def test_unequal_sites_train_what_one_process_does(tmp_path: Path) -> None:
    write_texts(tmp_path)
    ranks = [2, 1]
    with FakeGateways(tmp_path, ranks) as gateways:
        sockets = [gateways.path(site) for site in range(2)]
        codes = run_ranks(tmp_path, sockets, ranks, programs.train_placed)
    assert not gateways.problems
    assert set(codes.values()) == {0}

    job = load_job(JOB_TEXT, "job.yaml", programs.JOB)
    alone = train_alone(job, tmp_path)
    context = job.trainer.model.context
    steps = [(site, message) for site, _, message in gateways.metrics if message["kind"] == "step"]
    for step in range(1, STEPS + 1):
        by_site = {site: message["values"] for site, message in steps if message["step"] == step}
        tokens = sorted(values["site_tokens"] for values in by_site.values())
        assert tokens == [3 * context, 10 * context]
        loss = sum(values["loss"] * values["site_tokens"] for values in by_site.values())
        # Other float32 sums only: far below 1e-6 here, see tests/sites/test_trainer_reference.py.
        assert loss / sum(tokens) == pytest.approx(alone.losses[step - 1], rel=1e-6)
    digests = {(message["step"], message["combined"]) for _, _, message in gateways.digests}
    assert len(digests) == STEPS + 1, "one hash a step, whichever rank made it"
