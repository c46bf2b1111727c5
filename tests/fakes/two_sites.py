"""Two sites of one and three ranks that train, around fake gateways or those that ship."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
    *,
    verify_every: int = 1,
    swap_from_round: int | None = None,
    fail_at: tuple[int, int, dict[str, str] | None] | None = None,
    job: Sequence[str] = (),
) -> tuple[dict[str, Any], FakeGateways]:
    """Run a program in all ranks of both sites; each must end well."""
    with FakeGateways(
        folder, SITES, verify_every=verify_every, swap_from_round=swap_from_round, fail_at=fail_at
    ) as gateways:
        paths = [gateways.path(site) for site in range(len(SITES))]
        codes = run_ranks(folder, paths, SITES, program, job)
    assert codes == dict.fromkeys(NAMES, 0)
    assert gateways.problems == []
    return results(folder), gateways


def bits(tensor: torch.Tensor) -> list[int]:
    """A tensor's bytes: equality that NaN does not escape."""
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


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
            peers = zip(names, processes, strict=True)
            process.connect(*[(name, peer) for name, peer in peers if peer is not process])
        for process in processes:
            process.wait("connected")
        yield processes, paths
