"""The trainer's options: what layers compute with, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import JOB as JOB_TEXT
from tests.fakes.ranks import run_ranks
from tests.sites import trainer_programs as programs
from tests.sites.test_trainer_sites import write_texts

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.exhaustive]

STEPS = 12
COMPILED = "trainer.compile=true"
SHARDED = (
    "placement=[{site: site0, sequences: 8, parallel: {data: 2, zero_stage: 3}}, "
    "{site: site1, sequences: 5}]"
)
COMPILING_S = 250.0
"""By then a busy machine has compiled everything, too: in 70 to 100 s, mostly."""


def check_losses(gateways: FakeGateways, wanted: Sequence[float], tolerance: float) -> None:
    """Losses of all steps are these, and parameters equal at all ranks."""
    steps = [message for _, _, message in gateways.metrics if message["kind"] == "step"]
    for step in range(1, STEPS + 1):
        values = [message["values"] for message in steps if message["step"] == step]
        tokens = math.fsum(each["site_tokens"] for each in values)
        loss = math.fsum(each["loss"] * each["site_tokens"] for each in values) / tokens
        assert loss == pytest.approx(wanted[step - 1], rel=tolerance)
    digests = {(message["step"], message["combined"]) for _, _, message in gateways.digests}
    assert len(digests) == STEPS + 1, "equal at all ranks"


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        # bf16 has 8 bits: a logit is off by 0.4 %, a loss of 4.4 by less.
        (("trainer.precision=bf16",), 2e-2),
        ((COMPILED,), 1e-5),
        ((COMPILED, SHARDED), 1e-5),
        ((COMPILED, "trainer.precision=bf16"), 2e-2),
    ],
    ids=["bf16", "compiled", "compiled-fsdp", "compiled-bf16"],
)
def test_an_option_changes_what_is_learnt_by_rounding_only(
    tmp_path: Path, settings: tuple[str, ...], tolerance: float
) -> None:
    write_texts(tmp_path)
    (tmp_path / "settings.txt").write_text("\n".join(settings))
    with FakeGateways(tmp_path, [2, 1]) as gateways:
        sockets = [gateways.path(site) for site in range(2)]
        codes = run_ranks(tmp_path, sockets, [2, 1], programs.train_told, within_s=COMPILING_S)
    assert set(codes.values()) == {0}, [path.read_text() for path in tmp_path.glob("*.error")]
    alone = train_alone(load_job(JOB_TEXT, "job.yaml", programs.JOB), tmp_path)
    check_losses(gateways, alone.losses, tolerance)
    assert any((tmp_path / "compiled").rglob("*.so")) == (COMPILED in settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_lies_in_the_hosts_memory_is_learnt_as_on_the_device(tmp_path: Path) -> None:
    """Two sites of one rank each train on one device."""
    write_texts(tmp_path)
    (tmp_path / "settings.txt").write_text("trainer.offload=true")
    with FakeGateways(tmp_path, [1, 1]) as gateways:
        sockets = [gateways.path(site) for site in range(2)]
        codes = run_ranks(tmp_path, sockets, [1, 1], programs.train_told)
    assert set(codes.values()) == {0}, [path.read_text() for path in tmp_path.glob("*.error")]
    alone = train_alone(load_job(JOB_TEXT, "job.yaml", programs.JOB), tmp_path)
    check_losses(gateways, alone.losses, tolerance=1e-4)


def test_where_there_is_nothing_to_offload_from_the_trainer_says_so(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "settings.txt").write_text("trainer.offload=true")
    with FakeGateways(tmp_path, [1]) as gateways:
        codes = run_ranks(tmp_path, [gateways.path(0)], [1], programs.train_told)
    assert set(codes.values()) == {1}
    said = (tmp_path / "site0-0.error").read_text()
    assert "site0 computes on the host: there is nothing to offload from" in said
