"""Ranks of two sites with the gateways that ship: the whole way of a gradient, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.protos.metrics import BUCKET, STEP, TIMELINE
from isthmus.sites.worker.exchange.step_records import FIRST_STEPS
from tests.fakes.ranks import RANKS_S, Program, results, run_ranks
from tests.fakes.two_sites import (
    NAMES,
    SITES,
    check_digests,
    check_equal,
    check_trained_as_one,
    expected_grads,
    gateway_processes,
    run_with_gateways,
)
from tests.sites import worker_programs as programs
from tests.sites.training_programs import train_plain, train_sharded

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def test_two_sites_train_as_one_process(tmp_path: Path) -> None:
    saved, told = run_with_gateways(tmp_path, "split", programs.train)
    check_trained_as_one(saved)
    digests = [line for lines in told for line in lines if line["op"] == "digest"]
    check_digests(digests, programs.NUM_STEPS, len(NAMES))
    for lines in told:
        _check_records([line for line in lines if line["op"] == "metric"])


def _check_records(lines: Sequence[Mapping[str, Any]]) -> None:
    """Each step's parts fill it, and its buckets went through their phases in order."""
    assert len(_values(lines, STEP)) == programs.NUM_STEPS
    for step in range(1, programs.NUM_STEPS + 1):
        of_step = [line for line in lines if line["step"] == step]
        found = {kind: _values(of_step, kind) for kind in (STEP, TIMELINE, BUCKET)}
        (parts,) = found[STEP]
        whole_s = parts["step_s"]
        names = ("compute_s", "intra_s", "exposed_inter_s", "wait_s")
        assert sum(parts[name] for name in names) == pytest.approx(whole_s, rel=0.01)
        assert all(parts[name] > 0 for name in ("wire_bytes", "encode_s", "decode_s"))
        if step > FIRST_STEPS:  # and not yet the tenth
            assert (found[TIMELINE], found[BUCKET]) == ([], [])
            continue
        (timeline,) = found[TIMELINE]
        begin_s, computed_s, end_s = (timeline[name] for name in ("begin_s", "computed_s", "end_s"))
        # Wall clock seconds are stored to about a quarter of a microsecond.
        assert end_s - begin_s == pytest.approx(whole_s, abs=2e-6)
        assert [each["bucket"] for each in found[BUCKET]] == [*range(len(found[BUCKET]))]
        for each in found[BUCKET]:
            phases = [each[name] for name in ("submitted_s", "posted_s", "reduced_s", "finished_s")]
            assert [begin_s, *phases, end_s] == sorted([begin_s, *phases, end_s])
        assert max(each["submitted_s"] for each in found[BUCKET]) == computed_s
        for name in ("raw_bytes", "wire_bytes", "encode_s", "decode_s"):
            total = sum(each[name] for each in found[BUCKET])
            assert total == pytest.approx(parts[name]), name


def _values(lines: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, float]]:
    return [line["values"] for line in lines if line["kind"] == kind]


def test_a_lost_gateway_ends_its_ranks_and_is_suspected_by_the_others(tmp_path: Path) -> None:
    with gateway_processes(tmp_path, "bf16") as (processes, paths):

        def kill() -> None:
            # One rank's first digest would not do: others may still be about to begin to train.
            for process, num_ranks in zip(processes, SITES, strict=True):
                for rank in range(num_ranks):
                    process.wait("digest", RANKS_S, rank=rank, step=1)
            processes[1].process.kill()
            processes[0].wait("suspect", RANKS_S, site="site1", is_gone=True)
            processes[0].process.kill()  # its ranks would wait for what an agent says

        killer = threading.Thread(target=kill)
        killer.start()
        codes = run_ranks(tmp_path, paths, SITES, programs.backward_until_error)
        killer.join()
    assert codes == dict.fromkeys(NAMES, 0)
    saved = results(tmp_path)
    told = {name for name in NAMES if saved[name]["code"] == "GATEWAY_EXITED"}
    assert {name.partition("-")[0] for name in told} == {"site0", "site1"}
    # A rank may meet its neighbour's end first, in DDP's own broadcast of buffers.
    assert all("closed by peer" in saved[name]["text"] for name in {*NAMES} - told)


@pytest.mark.parametrize(
    "program",
    [
        programs.train,
        # Shards with gateways that ship: tests/sites/test_worker_layouts.py, tests/conformance.
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (train_sharded, train_plain)
        ),
    ],
    ids=lambda p: p.__name__,
)
def test_under_a_codec_that_rounds_sites_stay_equal(tmp_path: Path, program: Program) -> None:
    saved, told = run_with_gateways(tmp_path, "int4", program, (2, 2))
    check_equal(saved)
    digests = [line for lines in told for line in lines if line["op"] == "digest"]
    check_digests(digests, max(line["step"] for line in digests), 4)
    assert len({line["step"] for line in digests}) > programs.NUM_STEPS
    if program is programs.train:
        _check_rounding(saved["site0-rank0"]["grads"][0])


def _check_rounding(found: Sequence[torch.Tensor]) -> None:
    """Biases are exact, though in the same buckets as matrices, which are rounded."""
    wanted = expected_grads(programs.build(seed=0), 0, torch.float32)
    for grad, exact in zip(found, wanted, strict=True):
        error = float((grad - exact).norm() / exact.norm())
        assert error < 1e-5 if grad.dim() == 1 else 0.01 < error < 0.3, (tuple(grad.shape), error)
