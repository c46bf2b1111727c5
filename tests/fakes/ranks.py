"""Ranks as real processes, forked from a server that has imported torch once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.run_specs import spec_of_texts

RANKS_S = 90.0
"""By then every rank of a test has ended, even on a busy machine."""

TOPOLOGY = """
version: 1
name: fake
accelerators:
  core: {{peak: {{fp32: 50GFLOP/s}}, memory: 2GiB, mfu: 0.3}}
sites:
{sites}
links:
{links}
failure: {{detect_within: 6s, min_sites: 1, start_within: 60s}}
security: {{mode: insecure}}
"""
JOB = "version: 1\nname: fake\ntopology: topology.yaml\n"

_PRELOADED = [
    "tests.fakes.ranks",
    "isthmus.sites.worker.api.joining",
    # What wrapping a model imports, 1.5 s of a processor in each rank otherwise.
    "torch._dynamo",
    "torch.distributed.fsdp",
]

Program = Callable[[Path, str], None]
"""Runs in a rank: gets a folder for results, and this rank's name in it (`site0-rank1`)."""

_all_ranks: Barrier | None = None
"""In a rank's process: all ranks of all sites meet at it."""


def run_ranks(
    folder: Path,
    sockets: Sequence[Path],
    ranks_per_site: Sequence[int],
    program: Program,
    job: Sequence[str] = (),
    *,
    within_s: float = RANKS_S,
) -> dict[str, int | None]:
    """Run `program` in every rank of every site; return exit codes by the ranks' names.

    Args:
        folder: for results and documents.
        sockets: of each site's gateway.
        ranks_per_site: in site order.
        program: what ranks run.
        job: settings that the job file has not, as `exchange.codec=int8`.
        within_s: who has not ended by then is killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    barrier = context.Barrier(sum(ranks_per_site))
    processes = {}
    for site, ranks in enumerate(ranks_per_site):
        for rank in range(ranks):
            name = f"site{site}-rank{rank}"
            environ = environment(folder, site, rank, ranks_per_site, sockets[site], job)
            processes[name] = context.Process(
                target=_rank, args=(program, folder, name, environ, barrier), daemon=True
            )
    deadline_s = time.monotonic() + within_s
    try:
        for process in processes.values():
            process.start()
        for process in processes.values():
            process.join(max(0.0, deadline_s - time.monotonic()))
        return {name: process.exitcode for name, process in processes.items()}
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join(10)
                process.close()


def environment(
    folder: Path,
    site: int,
    rank: int,
    ranks_per_site: Sequence[int],
    path: Path,
    job: Sequence[str] = (),
) -> dict[str, str]:
    """Return what a launcher would set."""
    spec = folder / "run_spec.json"
    spec.write_bytes(run_spec(ranks_per_site, job).to_bytes())
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks_per_site[site]),
        "GLOO_SOCKET_IFNAME": "lo",
        "TEST_STORE": str(folder / f"store{site}"),
        "ISTHMUS_RUN": "run",
        "ISTHMUS_GENERATION": "1",
        "ISTHMUS_SITE": f"site{site}",
        "ISTHMUS_GATEWAY": str(path),
        "ISTHMUS_SPEC": str(spec),
        "ISTHMUS_RUN_FOLDER": str(folder),
    }


def run_spec(ranks_per_site: Sequence[int], job: Sequence[str] = ()) -> RunSpec:
    """Return a run on a chain of sites of one node each; `job` are settings as `--set` has them."""
    sites = "\n".join(
        f"  - {{name: site{index}, nodes: 1, accelerators_per_node: {ranks}, accelerator: core}}"
        for index, ranks in enumerate(ranks_per_site)
    )
    links = "\n".join(
        f"  - {{between: [site{index - 1}, site{index}], bandwidth: 1Gbit/s, rtt: 1ms}}"
        for index in range(1, len(ranks_per_site))
    )
    topology = TOPOLOGY.format(sites=sites, links=links or "  []")
    return spec_of_texts(JOB, topology, job)


def results(folder: Path) -> dict[str, Any]:
    """Return what each rank saved as `<name>.pt`."""
    return {path.stem: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}


def wait_for_all_ranks() -> None:
    """Wait until all ranks of all sites have called this: none may leave while others still work.

    A rank that ends is noticed by the others, who may then fail before they see what they shall.
    """
    assert _all_ranks is not None
    _all_ranks.wait(RANKS_S)


def _rank(
    program: Program, folder: Path, name: str, environ: dict[str, str], barrier: Barrier
) -> None:
    global _all_ranks
    _all_ranks = barrier
    os.environ.update(environ)
    torch.set_num_threads(1)
    program(folder, name)
