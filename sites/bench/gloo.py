"""Runs torch.distributed's Gloo between sites: benchmarks compare the exchange with it.

Usage: python -m isthmus.sites.bench.gloo --rank R --world-size S --store FILE --device NAME
       --size-bytes N --count C --idle SECONDS --timeout SECONDS [--lanes L]

A site has one process, or L: the first of each site reduce a tensor of N bytes together, the second
ones another, and so on, all at the same time. R counts a site's processes one after another, S all.

Reduces the tensors of the benchmark's script, and prints one line of JSON at the end:
{"repeats": [{"begin_s", "end_s", "cpu_s"}, ..], "digest"}. The processes meet through FILE, so
nothing but Gloo's own connections crosses the links.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from isthmus.sites.bench.arguments import baseline_parser
from isthmus.sites.bench.tensors import FLOAT_BYTES, digest_of, values_of


def main(arguments: list[str]) -> int:
    """Reduce, and print what it took."""
    chosen = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # as in ranks of a run
    os.environ["GLOO_SOCKET_IFNAME"] = chosen.device
    dist.init_process_group(
        "gloo",
        init_method=f"file://{chosen.store}",
        rank=chosen.rank,
        world_size=chosen.world_size,
        timeout=timedelta(seconds=chosen.timeout),
    )
    lanes = [
        dist.new_group([*range(lane, chosen.world_size, chosen.lanes)])
        for lane in range(chosen.lanes)
    ]
    own = values_of(chosen.rank, chosen.size_bytes // FLOAT_BYTES)
    values, repeats = torch.empty_like(own), []
    for _ in range(chosen.count):
        values.copy_(own)
        time.sleep(chosen.idle)
        dist.barrier()
        cpu_s, begin_s = time.process_time(), time.time()
        dist.all_reduce(values, group=lanes[chosen.rank % chosen.lanes])
        end_s = time.time()
        repeats.append({"begin_s": begin_s, "end_s": end_s, "cpu_s": time.process_time() - cpu_s})
    sys.stdout.write(json.dumps({"repeats": repeats, "digest": digest_of(values)}) + "\n")
    dist.barrier()  # nobody goes while somebody still reads
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = baseline_parser("isthmus.sites.bench.gloo", __doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--lanes", type=int, default=1, help="processes of a site")
    parser.add_argument("--store", required=True, help="a file that all processes see")
    parser.add_argument("--device", required=True, help="network interface")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
