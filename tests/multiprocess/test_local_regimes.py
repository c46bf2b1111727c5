"""Whole runs in which sites take steps of their own between rounds."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from isthmus.protos.catalogue import ExitCode
from isthmus.protos.checkpoint.store import checkpoint_name
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, steps_of, victim
from tests.sites.test_sharded_checkpoints import everything

pytestmark = [UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow]

SYNC_EVERY = 4
SCRIPT = Path(__file__).parent / "scripts" / "user_checkpoint.py"


def settings(kind: str) -> list[str]:
    """Return what `launch` is told of the regime."""
    found = [f"regime.kind={kind}", f"regime.sync_every={SYNC_EVERY}"]
    if kind != "local_sgd":
        found.append("regime.outer.ramp_steps=8")
    if kind == "streaming":
        found += ["regime.fragments=2", "regime.delay=1"]
    return [word for each in found for word in ("--set", each)]


def values_of(run: Bench, kind: str, site: str) -> dict[int, dict[str, float]]:
    """Return what a site has told in records of a kind, by step."""
    return {
        each["step"]: each["values"]
        for each in run.metrics()
        if (each["kind"], each["site"]) == (kind, site)
    }


@pytest.mark.parametrize(
    "kind",
    [
        "diloco",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("local_sgd", "streaming")),
    ],
)
def test_the_shipped_trainer_learns_in_rounds(run: Bench, kind: str) -> None:
    steps = 5 * SYNC_EVERY + 2
    topology = topology_yaml([(1, 1), (1, 1)], emulate=False, rtt="2ms")
    run.launch(topology, job_yaml(steps=steps, codec="int8"), *settings(kind)).check()
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    assert status["totals"]["verified_steps"] == 6, "the beginning, and where rounds end"
    for site in "ab":
        taken = values_of(run, "step", site)
        assert [*taken] == [*range(1, steps + 1)]
        crossed = [step for step, each in taken.items() if each["wire_bytes"]]
        if kind == "streaming":
            assert crossed == [*range(3, steps, 2)], "a step after every second one"
            continue
        assert crossed == [*range(SYNC_EVERY, steps + 1, SYNC_EVERY)]
        assert all(each["exposed_inter_s"] > 0.0 for each in map(taken.get, crossed) if each)
    held_out = [values_of(run, "evaluation", site)[steps]["held_out_loss"] for site in "ab"]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-6), "global parameters"
    losses = run.losses()
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.exhaustive
@pytest.mark.parametrize("regime", ["diloco", "streaming"])
@pytest.mark.parametrize("role", ["gateway", "rank"])
def test_a_site_fails_amid_a_round_and_the_others_lose_no_step(
    run: Bench, role: str, regime: str
) -> None:
    """What they have moved is in the next round."""
    steps = 80
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], rtt="2ms", detect_within="5s", min_sites=1, max_restarts=0
    )
    job = run.write(topology, job_yaml(steps=steps, codec="int8"))
    process = run.start("launch", str(job), "--json", *settings(regime))
    run.wait_for("first steps", lambda: is_training(run, 5))
    kill(victim(run, role))
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.WITH_LOSSES, f"{out}\n{err}\n{run.logs()}"
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    assert status["totals"]["verified_steps"] >= steps // SYNC_EVERY - 1
    for site in "ab":
        assert Counter(steps_of(run, site)) == Counter(range(1, steps + 1)), site
    assert run.losses()[-1] < run.losses()[0] - 0.3


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "regime"), [("ddp", "diloco"), ("fsdp", "diloco"), ("ddp", "streaming")]
)
def test_a_site_comes_back_between_two_rounds(run: Bench, kind: str, regime: str) -> None:
    """With a data loader that fetches ahead; it takes global parameters and momentum over."""
    steps = 2200 if kind == "ddp" else 1200
    topology = topology_yaml(
        [(1, 2), (1, 1), (1, 2)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=1, codec="int8") + f"entrypoint: {SCRIPT}\n"
    text += f"arguments: ['{steps}', {kind}, '0.1']\ncheckpoint: {{every: 200 steps, keep: 2}}\n"
    job = run.write(topology, text)
    process = run.start("launch", str(job), "--json", *settings(regime))
    run.wait_for("first steps", lambda: is_training(run, 5))
    kill(victim(run, "gateway"))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    kinds = [each["kind"] for each in events]
    assert "site.returned" in kinds
    for site in "ab":
        assert Counter(steps_of(run, site)) == Counter(range(1, steps + 1)), site
    own = steps_of(run, "c")
    assert own[-1] == steps
    assert len(set(own)) == len(own) < steps
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["totals"]["verified_steps"] >= steps // SYNC_EVERY - 10
    run.wait_for_nothing_left(15.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("regime", ["diloco", "streaming"])
def test_a_run_that_was_killed_ends_in_the_same_bits(run: Bench, regime: str) -> None:
    """With what a codec has left out, from the checkpoint of a round's last step."""
    steps, every = 24, 2 * SYNC_EVERY
    text = job_yaml(steps=1, codec="int8") + f"entrypoint: {SCRIPT}\n"
    text += f"arguments: ['{steps}', ddp, '0.1']\n"
    text += f"checkpoint: {{every: {every} steps, keep: 9, to: {run.folder}/checkpoints}}\n"
    topology = topology_yaml([(1, 2), (1, 1)], emulate=False, rtt="2ms")
    path = run.write(topology, text)
    run.isthmus("launch", str(path), "--run-id", "whole", *settings(regime)).check()
    resumed_from = run.folder / "checkpoints" / "whole" / checkpoint_name(every)
    more = ["--set", f"checkpoint.resume={resumed_from}"]
    run.isthmus("launch", str(path), "--run-id", "resumed", *settings(regime), *more).check()
    expected, found = (
        everything(run.folder / "checkpoints" / each, steps) for each in ("whole", "resumed")
    )
    assert found.keys() == expected.keys()
    assert not [name for name, each in found.items() if not torch.equal(each, expected[name])]
