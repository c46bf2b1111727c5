"""The trainer with sequences that are cut over ranks: it learns what one process does.

On the host attention is torch's ring with the CPU's kernel in it (tests/fakes/host_ring.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental

from isthmus.sites.trainer import ring
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import learn_from, sequences
from isthmus.sites.trainer.ring import check_can_cut, cut_sequences
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.errors import ConfigError
from tests.fakes import host_ring
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import JOB, run_ranks
from tests.sites import trainer_programs as programs
from tests.sites.test_layout_properties import as_rank
from tests.sites.test_trainer_layouts import DEEP, EXPERTS, LAYOUTS, UNTIED, check
from tests.sites.test_trainer_sites import write_texts

HOST = torch.device("cpu")
TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)
CUTS = {
    "zero": ("{context: 2, zero_stage: 1, micro_batch: 2}", ()),
    "data": ("{context: 2, data: 2, zero_stage: 3, micro_batch: 2}", ()),
    "three": ("{context: 3, zero_stage: 3, micro_batch: 4, recompute: full}", (UNTIED,)),
    "tensor": ("{context: 2, tensor: 2, micro_batch: 4, recompute: selective}", ()),
    "replicas": ("{context: 2, data: 2}", ("trainer.global_batch=12",)),
    "hsdp": ("{context: 2, data: 2, replicate: 2, zero_stage: 1, micro_batch: 4}", ()),
    "experts": ("{context: 2, zero_stage: 1, micro_batch: 3}", EXPERTS),
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.parametrize("cut", CUTS)
def test_a_site_that_cuts_sequences_learns_what_one_process_does(tmp_path: Path, cut: str) -> None:
    check(tmp_path, [CUTS[cut][0]], CUTS[cut][1], programs.train_in_a_ring)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_beside_a_site_with_whole_sequences_it_learns_what_one_process_does(
    tmp_path: Path,
) -> None:
    """Each rank of the first counts half of its tokens; those of the second have unlike numbers."""
    cuts = [CUTS["zero"][0], LAYOUTS["fsdp"][0]]
    check(tmp_path, cuts, DEEP, programs.train_in_a_ring)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [(("trainer.precision=bf16",), 2e-2), ((), 1e-4)],
    ids=["bf16", "fp32"],
)
def test_on_a_card_it_learns_what_one_process_does(
    tmp_path: Path, settings: tuple[str, ...], tolerance: float
) -> None:
    """Two NCCL ranks, on one card if need be."""
    long = "trainer.model.context=256"
    cut = "{context: 2, zero_stage: 1, micro_batch: 2}"
    check(
        tmp_path, [cut], (*settings, long), programs.train_in_a_ring_on_a_card, tolerance=tolerance
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_have_each_token_once_with_its_place_and_what_comes_after(num_ranks: int) -> None:
    """Each has a piece from the front and the same from the end."""
    whole = sequences(TEXT, np.array([0, 100, 555]), 24, HOST)
    inputs, found = whole.inputs.clone(), []
    piece = 24 // (2 * num_ranks)
    for rank in range(num_ranks):
        with as_rank(rank, (num_ranks,)) as mesh, cut_sequences(whole, mesh) as own:
            assert own.places is not None
            places = own.places[0]
            assert torch.equal(own.inputs, inputs[:, places])
            assert torch.equal(own.targets, whole.targets[:, places])
            front = range(rank * piece, (rank + 1) * piece)
            back = range(24 - front.stop, 24 - front.start)
            assert places.tolist() == [*front, *back]
            found += places.tolist()
    assert sorted(found) == [*range(24)]
    assert torch.equal(whole.inputs, inputs), "the whole is not touched"


@pytest.mark.usefixtures("process_group")
def test_a_ring_of_one_rank_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for op, handler in host_ring.HANDLERS.items():
        monkeypatch.setitem(host_ring.custom_ops(), op, handler)
    config = load_job(JOB, "job.yaml", programs.JOB).trainer
    samples, losses, grads = np.arange(5), [], []
    for mesh in (None, init_device_mesh("cpu", (1,))):
        model = Gpt(config.model, config.seed)
        loss_sum, tokens = learn_from(model, TEXT, config, samples, 0, mesh)
        assert tokens == 5 * config.model.context
        losses.append(float(loss_sum))
        made = [each.grad for each in model.parameters() if each.grad is not None]
        grads.append(torch.cat([each.flatten() for each in made]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-7)


def test_what_has_no_ring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"site east computes on the host.*want context: 1"):
        check_can_cut("east", HOST)
    monkeypatch.setattr(ring, "DEVICES", ("cpu",))
    check_can_cut("east", HOST)
    monkeypatch.delattr(experimental, "context_parallel")
    with pytest.raises(ConfigError, match="of site east has no context_parallel"):
        check_can_cut("east", HOST)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_trainer_refuses_on_a_host(tmp_path: Path) -> None:
    write_texts(tmp_path)
    placement = "placement=[{site: site0, sequences: 13, parallel: {context: 2, zero_stage: 1}}]"
    (tmp_path / "settings.txt").write_text(placement)
    with FakeGateways(tmp_path, [2]) as gateways:
        codes = run_ranks(tmp_path, [gateways.path(0)], [2], programs.train_told)
    assert set(codes.values()) == {1}
    assert "torch's ring attention does not run there" in (tmp_path / "site0-0.error").read_text()
