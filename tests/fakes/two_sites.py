"""Sites that train around fake gateways or those that ship: of one rank and three, if not said.

And what must come of it: all ranks have the same bits, as one process has that has all data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus.sites.node.gateway_configs import gateway_config
from tests.fakes.gateway_process import GatewayProcess
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program, results, run_ranks, run_spec
from tests.sites import worker_programs as programs

SITES = (1, 3)
NAMES = ["site0-rank0", "site1-rank0", "site1-rank1", "site1-rank2"]


def run(
    folder: Path,
    program: Program,
    ranks_per_site: Sequence[int] = SITES,
    *,
    job: Sequence[str] = (),
    **options: Any,  # noqa: ANN401 - of the gateways
) -> tuple[dict[str, Any], FakeGateways]:
    """Run a program in all ranks of all sites, around fake gateways; each must end well."""
    with FakeGateways(folder, ranks_per_site, **options) as gateways:
        codes = run_ranks(folder, gateways.paths, ranks_per_site, program, job)
    assert len(codes) == sum(ranks_per_site)
    assert set(codes.values()) == {0}
    assert gateways.problems == []
    return results(folder), gateways


def run_with_gateways(
    folder: Path,
    codec: str,
    program: Program,
    ranks_per_site: Sequence[int] = SITES,
    *,
    job: Sequence[str] = (),
) -> tuple[dict[str, Any], list[list[Mapping[str, Any]]]]:
    """Run a program with the gateways that ship; return what each of these has told, too."""
    folder.mkdir(exist_ok=True)
    job = [f"exchange.codec={codec}", *job]
    with gateway_processes(folder, codec, ranks_per_site) as (processes, paths):
        codes = run_ranks(folder, paths, ranks_per_site, program, job)
        assert {process.end() for process in processes} == {0}
        lines = [process.messages for process in processes]
    assert len(codes) == sum(ranks_per_site)
    assert set(codes.values()) == {0}
    return results(folder), lines


def bits(tensor: torch.Tensor) -> list[int]:
    """A tensor's bytes: equality that NaN does not escape."""
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def bits_of(state: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """The bytes of all tensors of a state."""
    return {key: bits(value) for key, value in state.items()}


def check_equal(saved: Mapping[str, Any], key: str = "final") -> None:
    """All ranks have saved the same bits."""
    first, *others = (bits_of(each[key]) for each in saved.values())
    assert all(each == first for each in others)


def check_digests(
    digests: Iterable[Mapping[str, Any]], num_steps: int, num_ranks: int, *, every: int = 1
) -> None:
    """All ranks of all sites had the same parameters in every step, or each `every`-th."""
    by_step: dict[int, list[int]] = {}
    for digest in digests:
        by_step.setdefault(digest["step"], []).append(digest["combined"])
    assert sorted(by_step) == [*range(0, num_steps + 1, every)]
    for step, each in by_step.items():
        assert len(each) == num_ranks, step
        assert len(set(each)) == 1, f"digests of step {step} differ"


def check_trained_as_one(saved: Mapping[str, Any]) -> None:
    """`worker_programs.train` at four ranks began and ended alike, and stepped as one process."""
    net = programs.build(seed=0)
    for name in NAMES:
        found = saved[name]["initial"]
        assert bits_of(found) == bits_of(net.state_dict()), "the first site's state, bit for bit"
    check_equal(saved)
    for step in range(programs.NUM_STEPS):
        wanted = expected_grads(net, step, torch.float32)
        grads = saved[NAMES[0]]["grads"][step]
        # Sums of four float32 numbers in another order.
        torch.testing.assert_close(grads, wanted, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for each, grad in zip(net.parameters(), grads, strict=True):
                each.sub_(programs.LEARNING_RATE * grad)


def expected_grads(net: nn.Module, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One process over the batches of all ranks: the average weighted by tokens."""
    total = [torch.zeros_like(each) for each in net.parameters()]
    weight = 0.0
    micro_batches = (0, 1) if step >= programs.FIRST_ACCUMULATED_STEP else (0,)
    for rank in range(sum(SITES)):
        tokens = programs.tokens_of(step, rank)
        weight += tokens
        net.zero_grad()
        for micro in micro_batches:
            loss = programs.loss_of(net, step, rank, micro, dtype) / len(micro_batches)
            torch.autograd.backward(loss)
        for sum_, each in zip(total, net.parameters(), strict=True):
            assert each.grad is not None
            sum_ += tokens * each.grad
    return [each / weight for each in total]


@contextmanager
def gateway_processes(
    folder: Path, codec: str, ranks_per_site: Sequence[int] = SITES
) -> Iterator[tuple[list[GatewayProcess], list[Path]]]:
    """Start a gateway for each site and connect them."""
    paths = [folder / f"gateway{site}" for site in range(len(ranks_per_site))]
    spec = run_spec(ranks_per_site, [f"exchange.codec={codec}"])
    names = spec.site_names
    with ExitStack() as stack:
        processes = [stack.enter_context(GatewayProcess(folder / f"{name}.log")) for name in names]
        for name, path, process in zip(names, paths, processes, strict=True):
            config = gateway_config(
                spec,
                run_id="run",
                generation=1,
                config_hash="hash",
                site=name,
                gateway=0,
                bind_host="127.0.0.1",
                socket_path=str(path),
            )
            # Small chunks, so that a bucket has several, which end within ranks' shards.
            process.configure(dataclasses.replace(config, chunk_bytes=1024, verify_every=1))
        for process in processes:
            process.connect(*(peer for peer in processes if peer is not process))
        for process in processes:
            process.wait("connected")
        yield processes, paths
