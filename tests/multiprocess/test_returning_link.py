"""A site comes back though its link is cut while it takes over the other's state."""

from pathlib import Path

import psutil
import pytest

from isthmus.sites.local.entry_folder import INDEX, PIECE_BYTES, TENSORS
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, steps_of
from tests.tools.soak import reset

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
]

STEPS = 60
JOB = f"""\
version: 1
name: test
topology: topology.yaml
exchange: {{codec: int8, chunk: 1MiB, bucket: 4MiB}}
verify: {{parameters_every: 1}}
trainer:
  steps: {STEPS}
  compute: modelled
  global_batch: 16
  micro_batch: 8
  model: {{layers: 3, heads: 8, width: 384, context: 64}}
  data: {{max_bytes: 1MiB}}
"""


def gateway(run: Bench, site: str) -> int:
    return run.children(
        run.pids("isthmus.sites.agent", f"--site {site}")[0], "isthmus.sites.gateway"
    )[0]


def written_bytes(run: Bench, site: str) -> int:
    """Return how much of another site's state has come, 0 before and after."""
    for path in Path(run.home).glob(f"**/{site}/**/entry/epoch-*/{TENSORS}"):
        if not (path.parent / INDEX).exists():
            return path.stat().st_blocks * 512
    return 0


def wait_for_pieces(run: Bench, num_pieces: int) -> None:
    run.wait_for("the state", lambda: written_bytes(run, "b") > num_pieces * PIECE_BYTES)


def test_two_cuts_of_its_link_cost_a_piece_each(run: Bench) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1, bandwidth="200Mbit/s"
    )
    job = run.write(topology, JOB)
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 4))
    kill(gateway(run, "b"))
    for num_pieces in (2, 6):
        wait_for_pieces(run, num_pieces)
        reset(psutil.Process(gateway(run, "b")))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"

    [entry] = [each["values"] for each in run.metrics() if each["kind"] == "entry"]
    assert 1 <= entry["again"] <= 2, entry
    assert steps_of(run, "a") == [*range(1, STEPS + 1)]
    steps = steps_of(run, "b")
    assert steps[-1] == STEPS
    assert len(set(steps)) == len(steps) < STEPS
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["totals"]["verified_steps"] >= STEPS - 20
    run.wait_for_nothing_left(15.0)
