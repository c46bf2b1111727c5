"""Several sites train what one process would: the claim on which everything else stands.

Tolerance of the losses: 1e-5 relative. Gradients are the same sums in another order, so they differ
by float32 rounding (6e-8 relative an addition); AdamW divides by the gradients' own size and so
carries rounding into every parameter; over 50 steps of this job that was measured to move the loss
by less than 1e-6 when only the split into micro-batches changes
(tests/sites/test_trainer_reference.py).
"""

import math

import pytest

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [
    *(pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(400)),
    pytest.mark.exhaustive,  # tests/multiprocess/test_mtls_run.py has one such run
]

STEPS = 50
EQUAL = [(1, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("sites", "tree"),
    [
        pytest.param(EQUAL, "star", id="3x2"),
        pytest.param([(1, 1), (1, 2)], "gather", id="1-and-2-ranks"),
        pytest.param([(1, 1), (1, 3)], "gather", id="1-and-3-ranks"),
        pytest.param([(1, 2), (2, 1)], "gather", id="1-and-2-nodes"),
    ],
)
def test_losses_equal_those_of_one_process(
    run: Bench, sites: list[tuple[int, int]], tree: str
) -> None:
    # 13 sequences a step over 3 to 6 ranks: nothing divides, so the weights have to be right.
    job = job_yaml(steps=STEPS, codec="fp32", tree=tree, global_batch=13)
    result = run.launch(topology_yaml(sites, rtt="4ms"), job).check()
    assert result.envelope["data"]["verified_steps"] == 1 + STEPS

    alone = train_alone(load_job(job, "job.yaml"), run.folder)

    losses = run.losses()
    assert len(losses) == STEPS
    worst = max(abs(a - b) / b for a, b in zip(losses, alone.losses, strict=True))
    assert worst < 1e-5, f"losses differ by {worst:.2e} relative"
    assert losses[-1] < losses[0] - 0.3
    assert all(math.isfinite(loss) for loss in losses)


# Every codec with every tree: tests/sites/test_bit_identity.py. Here one of each kind, through
# everything: whose sizes are known and whose are not, with a residual and without; fp32 is above.
@pytest.mark.parametrize(("codec", "tree"), [("bf16-split", "gather"), ("int4-zstd", "star")])
def test_parameters_stay_bit_identical_with_each_kind_of_codec(
    run: Bench, codec: str, tree: str
) -> None:
    sites = [(1, 1), (1, 2), (1, 1)]
    job = job_yaml(steps=4, codec=codec, tree=tree, width=33 * 2, global_batch=5)
    result = run.launch(topology_yaml(sites, rtt="2ms"), job).check()
    assert result.envelope["data"]["verified_steps"] == 1 + 4
