"""Everything is killed at some moment; what goes on from the last checkpoint ends in the same bits.

And at other numbers of sites and ranks, in the same losses.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.protos.checkpoint.store import checkpoint_name, checkpoints_in
from isthmus.sites.checkpoint.export import model_tensors
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS
from tests.multiprocess.harness import (
    UNDER_BOTH_SECURITIES,
    Bench,
    bench,
    job_yaml,
    kill,
    topology_yaml,
)

pytestmark = [
    *(UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow),
    pytest.mark.exhaustive,
]

STEPS = 30
GLOBAL_BATCH = 12
SCRIPT = Path(__file__).parent / "scripts" / "user_checkpoint.py"
KINDS = ["trainer-fp32", "fsdp-int8", "ddp-int8", "fsdp-fp32", "trainer-int4"]


def job(kind: str, *, dropout: float = 0.1) -> str:
    """Return a job that saves every third step."""
    what, codec = kind.split("-")
    text = job_yaml(steps=STEPS, codec=codec, global_batch=GLOBAL_BATCH)
    text += "checkpoint: {every: 3 steps, keep: 4}\n"
    if what != "trainer":
        text += f"entrypoint: {SCRIPT}\narguments: ['{STEPS}', {what}, '{dropout}']\n"
    return text


def sites_of(kind: str) -> list[tuple[int, int]]:
    """Return the sites of a run that is interrupted: shards take two ranks, time is short."""
    return [(1, 2), (1, 1)] if kind.startswith("fsdp") else [(1, 1), (1, 1)]


def topology(sites: list[tuple[int, int]]) -> str:
    return topology_yaml(sites, emulate=False, rtt="2ms")


def store(run: Bench, run_id: str) -> Path:
    return run.folder / "checkpoints" / run_id


def final(run: Bench, run_id: str) -> dict[str, torch.Tensor]:
    """Return the parameters after the last step."""
    return model_tensors(str(store(run, run_id) / checkpoint_name(STEPS)))


class Wholes:
    """Runs that nobody interrupts, one of each kind, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Bench] = {}

    def of(self, kind: str) -> Bench:
        """Return the bench of that kind's run, `whole`."""
        if kind not in self.made:
            (self.folder / kind).mkdir()
            with bench(self.folder / kind) as made:
                made.launch(topology(sites_of(kind)), job(kind), "--run-id", "whole").check()
            self.made[kind] = made
        return self.made[kind]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return Wholes(tmp_path_factory.mktemp("wholes"))


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_was_killed_ends_in_the_same_bits(run: Bench, seed: int, wholes: Wholes) -> None:
    kind = KINDS[seed % len(KINDS)]
    expected = final(wholes.of(kind), "whole")
    path = run.write(topology(sites_of(kind)), job(kind))
    process = run.start("launch", str(path), "--run-id", "killed")
    killed_after = checkpoint_name(3 * random.Random(seed).randint(1, 3))
    run.wait_for(
        f"{killed_after} of {seed=}",
        lambda: any(each.name >= killed_after for each in store(run, "killed").glob("step-*")),
    )
    run.processes.kill()
    process.communicate()

    resumed = run.isthmus("launch", str(path), "--run-id", "resumed", "--resume").check()

    assert "resumes killed after step" in resumed.err
    found = final(run, "resumed")
    assert found.keys() == expected.keys()
    different = [name for name, each in found.items() if not torch.equal(each, expected[name])]
    assert not different, f"{seed=}: {resumed.err}"


@pytest.mark.parametrize(
    "sites",
    [
        pytest.param([(1, 1), (1, 1), (1, 1)], id="2-to-3-sites"),
        pytest.param([(1, 2), (1, 3)], id="2-to-5-ranks"),
    ],
)
def test_other_numbers_of_sites_and_ranks_go_on_alike(
    run: Bench, wholes: Wholes, sites: list[tuple[int, int]]
) -> None:
    whole = wholes.of("trainer-fp32")
    stored = store(whole, "whole") / checkpoint_name(STEPS - 9)
    path = run.write(topology(sites), job("trainer-fp32"))
    run.isthmus("launch", str(path), "--run-id", "other", "--resume", str(stored)).check()
    check_goes_on(run, "other", whole.losses("whole"))


def test_four_ranks_go_on_in_two(run: Bench) -> None:
    run.launch(topology([(1, 2), (1, 2)]), job("trainer-fp32"), "--run-id", "four").check()
    stored = store(run, "four") / checkpoint_name(STEPS - 9)
    path = run.write(topology([(1, 1), (1, 1)]), job("trainer-fp32"))
    run.isthmus("launch", str(path), "--run-id", "two", "--resume", str(stored)).check()
    check_goes_on(run, "two", run.losses("four"))


def check_goes_on(run: Bench, run_id: str, whole: list[float]) -> None:
    """Check the last nine steps of a run: the losses of the same samples, each taken once."""
    # Other float32 sums only: tests/multiprocess/test_same_training.py.
    assert run.losses(run_id) == pytest.approx(whole[-9:], rel=1e-5)
    data = [each.manifest() for each in checkpoints_in(str(store(run, run_id)))]
    assert [(each.data["next"], each.data["holes"]) for each in data] == [
        (each.step * GLOBAL_BATCH, []) for each in data
    ]


def test_four_ranks_state_goes_on_in_two_with_fsdp(run: Bench) -> None:
    run.launch(
        topology([(1, 4), (1, 1)]), job("fsdp-fp32", dropout=0.0), "--run-id", "four"
    ).check()
    stored = store(run, "four") / checkpoint_name(STEPS - 9)
    path = run.write(topology([(1, 2), (1, 1)]), job("fsdp-fp32", dropout=0.0))
    run.isthmus("launch", str(path), "--run-id", "two", "--resume", str(stored)).check()
    # Sums of float32 in another order, which AdamW's division makes larger: nine steps of 5 %.
    expected = final(run, "four")
    for name, each in final(run, "two").items():
        torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-5)


def test_the_batch_and_the_learning_rate_shrink_with_the_ranks(run: Bench) -> None:
    text = job("trainer-fp32") + "on_fewer_sites: shrink\n"
    run.launch(topology([(1, 2), (1, 1)]), text, "--run-id", "whole").check()
    whole, stored = run, store(run, "whole") / checkpoint_name(STEPS - 9)
    path = run.write(topology([(1, 1), (1, 1)]), text)
    run.isthmus("launch", str(path), "--run-id", "fewer", "--resume", str(stored)).check()
    for name in ("learning_rate", "tokens"):
        full = [each["values"][name] for each in steps_of(whole, "whole")][-9:]
        assert [each["values"][name] for each in steps_of(run, "fewer")] == pytest.approx(
            [value * 2 / 3 for value in full]
        )
    # Back at the full number of ranks, both are full again.
    run.write(topology([(1, 2), (1, 1)]), text)
    fewer = store(run, "fewer") / checkpoint_name(STEPS - 6)
    run.isthmus("launch", str(path), "--run-id", "full", "--resume", str(fewer)).check()
    for name in ("learning_rate", "tokens"):
        full = [each["values"][name] for each in steps_of(whole, "whole")][-6:]
        assert [each["values"][name] for each in steps_of(run, "full")] == pytest.approx(full)


def steps_of(run: Bench, run_id: str) -> list[dict[str, Any]]:
    """Return the records of the first site's steps."""
    found = [each for each in run.metrics(run_id) if each["kind"] == "step" and each["site"] == "a"]
    return [each for each in found if "step_s" in each["values"]]


def stepping(run: Bench) -> bool:
    """Whether the only run has begun to take steps."""
    return any(
        path.read_text().count('"kind": "step"') > 8
        for path in (run.home / "runs").glob("*/metrics.jsonl")
    )


def newest_step(run: Bench) -> int:
    found = sorted(store(run, "stopped").glob("step-*"))
    return int(found[-1].name.removeprefix("step-")) if found else 0


@pytest.mark.parametrize("by", ["cancel", "agent"])
def test_a_run_that_is_stopped_saves_first(run: Bench, by: str) -> None:
    text = job_yaml(steps=100_000) + "checkpoint: {every: 1h}\n"
    path = run.write(topology([(1, 1), (1, 1)]), text)
    process = run.start("launch", str(path), "--run-id", "stopped")
    run.wait_for("first steps", lambda: stepping(run))
    if by == "cancel":
        cancelled = run.isthmus("cancel", "--checkpoint").check()
        assert "checkpoint of step " in cancelled.err
    else:
        os.kill(run.pids("isthmus.sites.agent", "--site b")[0], signal.SIGTERM)
    process.communicate(timeout=60)
    step = newest_step(run)
    assert step > 0
    listed = run.isthmus("checkpoints", "verify", "--json").check()
    assert [each["step"] for each in listed.envelope["data"]["checkpoints"]] == [step]
    assert listed.envelope["data"]["checkpoints"][0]["missing"] == []
    assert process.returncode == (6 if by == "cancel" else 4)


def test_a_run_that_lost_its_first_site_saves_on_and_uses_each_sample_once(run: Bench) -> None:
    batch, steps = 12, 200
    text = job_yaml(steps=steps, global_batch=batch) + "checkpoint: {every: 20 steps, keep: 50}\n"
    sites = topology([(1, 1), (1, 1), (1, 1)]).replace("min_sites: 3", "min_sites: 1")
    process = run.start("launch", str(run.write(sites, text)), "--run-id", "stopped")
    run.wait_for("first steps", lambda: stepping(run))
    agent = run.pids("isthmus.sites.agent", "--site a")[0]
    kill(run.children(agent, "isthmus.sites.node.rank")[-1])
    process.communicate(timeout=100)
    assert process.returncode == 7, run.logs()
    manifests = [each.manifest() for each in checkpoints_in(str(store(run, "stopped")))]
    last = manifests[0]
    assert (last.step, last.ranks, last.missing) == (steps, {"b": 1, "c": 1}, ())
    # What the lost site had in 64 steps was handed out again, in place of new samples.
    assert last.data["holes"] == []
    assert last.data["next"] == steps * batch - NOTICE_STEPS * batch // 3
    for each in manifests:
        open_ones = sum(stop - start for start, stop in each.data["holes"])
        after_loss = min(NOTICE_STEPS, each.step) if open_ones else 0
        assert open_ones <= after_loss * batch // 3
