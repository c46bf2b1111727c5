"""Gateways as processes of their own, one of which is killed in the midst of a round.

The test is agent and coordinator: it settles the others, hands over what one has and another has
not, and resumes them. Their ranks notice only time.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.sites.gateway.agent_port import Cancel, Connect, Resume, Settle
from isthmus.sites.gateway.config import PeerLink
from isthmus.topology.spec.epoch import (
    Epoch,
    Finished,
    Handover,
    Runs,
    numbers_of,
    runs_of,
    union,
)
from isthmus.topology.spec.json_fields import read_json
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from isthmus.topology.spec.run_spec import CodedPlan
from tests.fakes.gateway_process import GatewayProcess
from tests.fakes.gateway_rank import Floats, GatewayRank
from tests.fakes.gateway_sites import SITES, gateway_config, reduce_once

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(120)]

NUMEL = 200_000
WEIGHTS = (1.0, 2.0, 3.0)
PLANS = {
    "gather": ReductionPlan(3, (), ""),
    "star at the lost one": ReductionPlan(3, (Tree(2, {0: 2, 1: 2}),), ""),
    "star at a survivor": ReductionPlan(3, (Tree(0, {1: 0, 2: 0}),), ""),
}
LEFT = ReductionPlan(3, (Tree(1, {0: 1}),), "", (0, 1))


def start_one(
    stack: ExitStack, folder: Path, plan: ReductionPlan, codec: str, site: int
) -> GatewayProcess:
    """Start one of three gateways, which may have links to all others."""
    links = tuple(
        PeerLink(site=SITES[other], bytes_per_s=1e9, rtt_s=0.001)
        for other in range(3)
        if other != site
    )
    config = gateway_config(folder, plan, site, links=links, codec=codec)
    process = stack.enter_context(GatewayProcess(folder / f"gateway{site}.log"))
    process.configure(config)
    return process


def start(stack: ExitStack, folder: Path, plan: ReductionPlan, codec: str) -> list[GatewayProcess]:
    """Start three gateways, and let them dial."""
    processes = [start_one(stack, folder, plan, codec, site) for site in range(3)]
    for process in processes:
        process.connect(*(each for each in processes if each is not process))
    for process in processes:
        process.wait("connected")
    return processes


def resume(
    number: int,
    from_round: int,
    plan: ReductionPlan,
    codec: str,
    members: Sequence[str] = SITES[:3],
    handovers: Sequence[Handover] = (),
) -> Resume:
    """Return the command to begin an epoch."""
    epoch = Epoch(number, tuple(members), CodedPlan(plan, (codec,)), from_round)
    return Resume(epoch=epoch, handovers=tuple(handovers))


def part_of(site: int, round_: int) -> Floats:
    generator = np.random.default_rng((round_, site))
    return (generator.standard_normal(NUMEL) * WEIGHTS[site]).astype(np.float32)


def handed_over(answers: Mapping[str, Mapping[str, Any]], round_: int) -> list[Handover]:
    """Return who gives whom what of the round's one bucket."""
    have: dict[str, Runs] = {}
    for site, answer in answers.items():
        finished = read_json(tuple[Finished, ...], answer["finished"])
        have[site] = union(*(each.runs for each in finished if each.round == round_))
    return [
        Handover(donor, receiver, round_, 0, runs)
        for donor in have
        for receiver in have
        if donor != receiver
        and (runs := runs_of({*numbers_of(have[donor])} - {*numbers_of(have[receiver])}))
    ]


@pytest.mark.parametrize("codec", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        "gather",
        # A star also in tests/multiprocess/test_lost_site.py.
        pytest.param("star at the lost one", marks=pytest.mark.exhaustive),
        pytest.param("star at a survivor", marks=pytest.mark.exhaustive),
    ],
)
def test_the_round_in_which_a_gateway_is_killed_ends_alike_at_all_others(
    name: str, codec: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        processes = start(stack, tmp_path, PLANS[name], codec)
        ranks = [
            stack.enter_context(GatewayRank(str(tmp_path / f"g{site}-0.sock"), 0))
            for site in range(3)
        ]
        for rank in ranks:
            assert rank.receive()["op"] == "welcome"
            rank.share(0, NUMEL)
        reduce_once([[rank] for rank in ranks], 0, NUMEL, list(WEIGHTS), seed=5)

        # Of some 200 chunks, some are finished when one of the three ends.
        parts = [part_of(site, 1) for site in range(3)]
        for site in (0, 1, 2):
            ranks[site].regions[0][:NUMEL] = parts[site]
        for site in (0, 1, 2):
            ranks[site].reduce(1, 0, NUMEL, WEIGHTS[site])
        processes[2].process.send_signal(signal.SIGKILL)
        for site in PLANS[name].neighbours(2):
            processes[site].wait("suspect", site=SITES[2], is_gone=True)

        survivors = {SITES[site]: processes[site] for site in (0, 1)}
        for process in survivors.values():
            process.tell(Settle(epoch=1, stops=True))
        answers = {site: each.wait("settled", epoch=1) for site, each in survivors.items()}
        assert {answer["round"] for answer in answers.values()} == {1}
        handovers = handed_over(answers, 1)
        for process in survivors.values():
            process.tell(resume(1, 1, LEFT, codec, [*survivors], handovers))
        for process in survivors.values():
            assert process.wait("resumed", epoch=1)["round"] == 1
        for site in (0, 1):
            assert ranks[site].receive()["op"] == "reduced"
        first, other = (ranks[site].regions[0][:NUMEL].copy() for site in (0, 1))
        assert first.tobytes() == other.tobytes()
        means = [
            np.sum(parts[:count], axis=0, dtype=np.float64) / sum(WEIGHTS[:count])
            for count in (2, 3)
        ]
        tolerance = 1e-5 if codec == "fp32" else 0.05
        for at in range(0, NUMEL, 64):
            off = min(float(np.abs(mean - first)[at : at + 64].max()) for mean in means)
            assert off < tolerance, at

        for round_ in (2, 3):
            reduce_once([[ranks[0]], [ranks[1]]], round_, NUMEL, list(WEIGHTS[:2]), seed=round_)

        # The site comes back, as another process, and takes part from round 6 on.
        returned = start_one(stack, tmp_path, PLANS[name], codec, 2)
        addresses = tuple(processes[site].address for site in (0, 1))
        returned.tell(Connect(peers=addresses, sites=SITES[:2]))
        for site in (0, 1):
            processes[site].tell(Connect(peers=(returned.address,), sites=SITES[2:3]))
        returned.wait("connected")
        ranks[2] = stack.enter_context(GatewayRank(str(tmp_path / "g2-0.sock"), 0))
        assert ranks[2].receive()["op"] == "welcome"
        everybody = [*processes[:2], returned]
        for process in everybody:
            process.tell(Settle(epoch=2, stops=False))
        assert [each.wait("settled", epoch=2)["round"] for each in everybody] == [3, 3, -1]
        for process in everybody:
            process.tell(resume(2, 6, PLANS[name], codec))
        for round_ in (4, 5):
            reduce_once([[ranks[0]], [ranks[1]]], round_, NUMEL, list(WEIGHTS[:2]), seed=round_)
        for round_ in (6, 7):
            reduce_once([[rank] for rank in ranks], round_, NUMEL, list(WEIGHTS), seed=round_)
        for rank in ranks:
            rank.leave()
        assert [process.end() for process in everybody] == [0] * 3


@pytest.mark.exhaustive  # tests/sites/test_gateway_switch.py has one in this process
def test_a_planned_change_costs_no_round(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes = start(stack, tmp_path, PLANS["gather"], "bf16")
        ranks = [
            [stack.enter_context(GatewayRank(str(tmp_path / f"g{site}-0.sock"), 0))]
            for site in range(3)
        ]
        for (rank,) in ranks:
            assert rank.receive()["op"] == "welcome"
        reduce_once(ranks, 0, 1000, list(WEIGHTS), seed=0)
        after = dataclasses.replace(PLANS["star at a survivor"], why="later")
        for epoch, command in ((1, Cancel(epoch=1)), (2, resume(2, 3, after, "bf16"))):
            for process in processes:
                process.tell(Settle(epoch=epoch, stops=False))
            for process in processes:
                assert process.wait("settled", epoch=epoch)["round"] == epoch - 1
            for process in processes:
                process.tell(command)
            reduce_once(ranks, epoch, 1000, list(WEIGHTS), seed=epoch)
        for round_ in (3, 4):
            reduce_once(ranks, round_, 1000, list(WEIGHTS), seed=round_)
        for (rank,) in ranks:
            rank.leave()
        assert [process.end() for process in processes] == [0] * 3
