"""The script of `isthmus bench allreduce`: one tensor, averaged over all sites, again and again.

Arguments: BYTES COUNT shared|own IDLE_S, the memory that the tensor lies in, and a pause before
each repetition. Each rank sends a record of kind `allreduce` a repetition (protos/metrics.py).
Sites begin together, as far as the end of a tiny all-reduce before each one lets them.
"""

from __future__ import annotations

import sys
import time

import torch

import isthmus
from isthmus.protos import metrics
from isthmus.sites.bench.gateways import cpu_s, gateways_of_site
from isthmus.sites.bench.tensors import FLOAT_BYTES, digest_of, relative_error, values_of


def main(arguments: list[str]) -> None:
    """Reduce `arguments[0]` bytes of float32, `arguments[1]` times, in memory of that kind."""
    numel, count = int(arguments[0]) // FLOAT_BYTES, int(arguments[1])
    is_shared = {"shared": True, "own": False}[arguments[2]]
    idle_s = float(arguments[3])
    site = isthmus.join()
    own = values_of(site.global_rank, numel).to(site.device)
    values = site.empty(*own.shape) if is_shared else torch.empty_like(own)
    together = torch.zeros(1, dtype=torch.float32, device=site.device)
    gateways = gateways_of_site() if site.rank == 0 else ()
    for repeat in range(count):
        values.copy_(own)
        time.sleep(idle_s)
        site.all_reduce([together], exact=True)
        _finish(site.device)
        gateways_s, own_s = cpu_s(gateways), time.process_time()
        begin_s = time.time()
        site.all_reduce([values])
        _finish(site.device)
        end_s = time.time()
        figures = {
            metrics.BEGIN_S: begin_s,
            metrics.END_S: end_s,
            metrics.RAW_BYTES: FLOAT_BYTES * numel,
            metrics.GATEWAYS_CPU_S: cpu_s(gateways) - gateways_s,
            metrics.RANK_CPU_S: time.process_time() - own_s,
        }
        if repeat == count - 1 and site.global_rank == 0:
            figures[metrics.RELATIVE_ERROR] = relative_error(values, site.global_world_size)
        site.record(metrics.ALLREDUCE, repeat, figures, {metrics.DIGEST: digest_of(values)})
    site.leave()


def _finish(device: torch.device) -> None:
    """Wait for what is only enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
