"""The scripts of examples/ run as they are."""

import importlib.util
from pathlib import Path

import pytest

from tests.multiprocess.harness import Bench

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

FRAMEWORKS = Path(__file__).parents[2] / "examples" / "frameworks"


@pytest.mark.parametrize(
    ("script", "library"),
    [
        ("gpt_loop.py", "torch"),
        ("transformers_trainer.py", "transformers"),
        ("accelerate_loop.py", "accelerate"),
        ("fabric_loop.py", "lightning"),
        ("lightning_trainer.py", "lightning"),
    ],
)
def test_it_trains_two_sites(run: Bench, script: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install isthmus[transformers,lightning]")
    job = (FRAMEWORKS / "job.yaml").read_text()
    job = job.replace("entrypoint: transformers_trainer.py", f"entrypoint: {FRAMEWORKS / script}")
    topology = (FRAMEWORKS / "topology.yaml").read_text()
    result = run.launch(topology, job + "verify: {parameters_every: 1}\n").check()
    losses = run.losses()
    assert len(losses) >= 15
    assert sum(losses[-5:]) < sum(losses[:5])
    assert result.envelope["data"]["verified_steps"] >= len(losses)
    run.wait_for_nothing_left(20)
