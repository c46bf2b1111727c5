"""A run whose checkpoints go to two regions outlives either of them, and resumes from the other."""

import pytest

from isthmus.protos.catalogue import ExitCode
from isthmus.protos.checkpoint.store import checkpoints_in, joined
from tests.fakes.s3 import S3
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]


def test_a_run_saves_and_resumes_while_one_of_two_regions_is_gone(run: Bench, s3: S3) -> None:
    europe, america = s3.url("europe"), s3.url("america")
    topology = topology_yaml([(1, 2), (1, 1)], emulate=False, rtt="2ms")
    saves = f"checkpoint: {{every: 2 steps, to: ['{europe}', '{america}']}}\n"
    path = run.write(topology, job_yaml(steps=4, codec="int8") + saves)
    run.isthmus("launch", str(path), "--run-id", "first").check()
    for store in (europe, america):
        assert [each.verified().step for each in checkpoints_in(joined(store, "first"))] == [4, 2]
    assert not [*run.home.rglob("*.distcp"), *run.home.rglob("*.npz")], "no copy at a site"

    run.write(topology, job_yaml(steps=8, codec="int8") + saves)
    with s3.without("europe"):
        done = run.isthmus("launch", str(path), "--run-id", "second", "--resume", "--json")
        assert "warning: a store does not answer: [Errno 13] the region is gone" in done.err
        assert f"resumes first after step 4: {america}" in done.err
        data = done.check(ExitCode.OK).envelope["data"]
        noted = [each["text"] for each in data["noted"] if each["kind"] == "store.failed"]
        assert f"could not write the checkpoint of step 6 to {europe}/" in noted[0]
    assert [each.step for each in checkpoints_in(joined(america, "second"))] == [8, 6]
    assert checkpoints_in(joined(europe, "second")) == []
