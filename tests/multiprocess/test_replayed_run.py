"""What a run has come to is what one process makes of its journal, bit for bit."""

from __future__ import annotations

import random
import subprocess
import time

import pytest
import torch

from isthmus.protos.catalogue import ExitCode
from isthmus.protos.checkpoint.store import checkpoints_in
from isthmus.sites.checkpoint.export import model_tensors
from tests.multiprocess.harness import Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.replay import Replay, journal_of
from tests.multiprocess.test_lost_site import is_training

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]


def check_replay(run: Bench) -> int:
    """Compare parameters after each step that was saved; return how many those are."""
    stored = {
        each.manifest().step: str(each.place)
        for each in checkpoints_in(str(next((run.folder / "checkpoints").iterdir())))
    }
    compared = 0
    for step, parameters in Replay(run.run_folder()).steps():
        if step not in stored:
            continue
        saved = model_tensors(stored[step])
        different = [
            name for name, each in saved.items() if not torch.equal(each, parameters[name])
        ]
        assert not different, f"after step {step}: {different}"
        assert saved.keys() == parameters.keys()
        compared += 1
    return compared


@pytest.mark.parametrize("tree", ["gather", "star"])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("lost", ["a", "c"])
def test_a_site_is_lost(run: Bench, codec: str, tree: str, lost: str) -> None:
    topology = topology_yaml([(1, 1), (1, 1), (1, 2)], rtt="20ms", min_sites=1, max_restarts=0)
    text = job(120, codec, tree)
    process = run.start("launch", str(run.write(topology, text)), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    time.sleep(random.Random(codec + tree + lost).uniform(0.0, 0.3))
    kill_gateway(run, lost)
    finish(run, process, ExitCode.WITH_LOSSES)
    (begun,) = journal_of(run.run_folder())
    assert lost not in begun.epoch.members
    # Where the first site is lost, nothing is saved until the next one writes what all have.
    assert check_replay(run) >= (10 if lost == "a" else 24)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_sites_are_lost_and_come_back(run: Bench, codec: str) -> None:
    sites = [(1, 1), (1, 1), (1, 2)]
    topology = topology_yaml(sites, emulate=False, detect_within="5s", min_sites=1)
    process = run.start("launch", str(run.write(topology, job(1500, codec, "gather"))), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    for count, site in enumerate("ca", start=1):
        kill_gateway(run, site)
        run.wait_for("its return", lambda: returns(run) == count)  # noqa: B023 - called here
    finish(run, process)
    assert returns(run) == 2
    assert check_replay(run) > 100


def job(steps: int, codec: str, tree: str) -> str:
    """Return a job with several buckets of several chunks that saves every fifth step."""
    text = job_yaml(steps=steps, tree=tree, codec=codec, width=64)
    assert "bucket: 256KiB" in text
    return f"{text}checkpoint: {{every: 5 steps, keep: 400}}\n"


def kill_gateway(run: Bench, site: str) -> None:
    agent = run.pids("isthmus.sites.agent", f"--site {site}")[0]
    kill(run.children(agent, "isthmus.sites.gateway")[0])


def finish(run: Bench, process: subprocess.Popen[str], code: int = 0) -> None:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"{out}\n{err}\n{run.logs()}"


def returns(run: Bench) -> int:
    """Return with how many epochs a site has come back."""
    return sum(each.lets_in for each in journal_of(run.run_folder()))
