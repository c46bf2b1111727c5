"""Measure what it takes to bring a bucket from the ranks that hold it to those that hand it over.

Ranks are processes of this machine, which talk by Gloo. Matrices of 1024 columns are cut in three
ways: by rows, which cross in rank-major order; by rows over half the ranks and by columns over the
others, as fully_shard over tensor parallelism does; and by columns alone. Buckets are brought in
and back one after another. GB/s are float32 bytes of the bucket over the time of both ways.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from isthmus.sites.worker.exchange.bucket_copy import Sizes, Slot, Transfer
from isthmus.sites.worker.exchange.collectives import Collectives, wait
from isthmus.sites.worker.exchange.holdings import Dealt, Holding
from isthmus.sites.worker.exchange.routes import Holders, Part, Route, rank_major_route, route

COLUMNS = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bucket-mib", type=int, default=4)
    parser.add_argument("--times", type=int, default=40)


def run(options: argparse.Namespace) -> None:
    """Print a row for each way of cutting."""
    rows = options.bucket_mib * (1 << 20) // 4 // COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, rows, options.times, f"{folder}/store")
        spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


def holders_of(way: str, rows: int, ranks: int) -> Holders:
    """Return who holds what of a matrix, which each way cuts so that each element is held once."""
    found = []
    for rank in range(ranks):
        axes = {
            "rows": [Dealt(0, ranks, rank)],
            "rows and columns": [Dealt(1, 2, rank % 2), Dealt(0, ranks // 2, rank // 2)],
            "columns": [Dealt(1, ranks, rank)],
        }[way]
        found.append((Holding.of((rows, COLUMNS), axes), (rank,)))
    return Holders(tuple(found))


def routes_of(rows: int, ranks: int, rank: int) -> dict[str, Route]:
    """Return the routes of a bucket that is a whole matrix, by the way that it is cut."""
    even = holders_of("rows", rows, ranks)
    found = {"rank-major": rank_major_route((Part(even, 0, even.shard_numel),), rank)}
    for way in ("rows", "rows and columns", "columns"):
        found[way] = route((Part(holders_of(way, rows, ranks), 0, rows * COLUMNS),), rank)
    return found


def measure(rank: int, ranks: int, rows: int, times: int, store: str) -> None:
    """Run one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    collectives = Collectives(60.0)
    transfer = Transfer(collectives)
    for way, each in routes_of(rows, ranks, rank).items():
        sizes = Sizes.of(each.numel, each, ranks)
        slot = transfer.make_slot(sizes, torch.zeros(sizes.shard_numel)).cut(sizes, each)
        own = torch.ones(each.held_numel)
        bring(transfer, slot, own, 3)  # warms up
        wait(collectives.all_reduce(torch.zeros(1)))
        began_s = time.perf_counter()
        bring(transfer, slot, own, times)
        each_s = (time.perf_counter() - began_s) / times
        if rank == 0:
            rate = 4 * rows * COLUMNS / each_s / 1e9
            print(f"{way:18} {1000 * each_s:8.2f} ms a bucket {rate:8.2f} GB/s")
    dist.destroy_process_group()


def bring(transfer: Transfer, slot: Slot, own: torch.Tensor, times: int) -> None:
    """Bring what a rank holds of a bucket in and back."""
    for _ in range(times):
        slot.padded.copy_(own)
        transfer.collect(slot, transfer.launch(slot))
        transfer.deliver(slot, [own], lambda: None)
