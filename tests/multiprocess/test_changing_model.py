"""A model grows on the way, and `site.attach` is called again, in real runs."""

from pathlib import Path

import pytest

from isthmus.protos.catalogue import ExitCode
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, topology_yaml
from tests.multiprocess.test_lost_site import steps_of

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).parent / "scripts" / "user_changes.py"
STEPS = 60
"""Those of a run whose first site is lost."""


@pytest.mark.parametrize(("kind", "codec"), [("ddp", "int8"), ("fsdp", "fp32")])
def test_it_grows_while_the_first_site_is_lost(run: Bench, kind: str, codec: str) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1, max_restarts=0
    )
    text = job_yaml(entrypoint=str(SCRIPT), codec=codec)
    job = run.write(topology, f"{text}arguments: ['{run.folder}', {kind}, lost]\n")
    done = run.isthmus("launch", str(job), "--json").check(ExitCode.WITH_LOSSES)
    assert done.envelope["data"]["verified_steps"] >= STEPS - 5
    for site in "bc":
        assert steps_of(run, site)[-1] == STEPS


@pytest.mark.parametrize(("kind", "codec"), [("ddp", "fp32"), ("fsdp", "fp32")])
def test_it_grows_while_a_site_that_has_come_back_learns(run: Bench, kind: str, codec: str) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(entrypoint=str(SCRIPT), codec=codec)
    job = run.write(topology, f"{text}arguments: ['{run.folder}', {kind}, returns]\n")
    run.isthmus("launch", str(job), "--json", timeout_s=200.0).check()
    last = {site: steps_of(run, site)[-1] for site in "abc"}
    assert len(set(last.values())) == 1, last
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["totals"]["verified_steps"] >= last["b"] - 20
