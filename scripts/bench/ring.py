"""Train a GPT on two ranks of one site: two replicas, and one with each sequence cut over both.

No run of isthmus is started: this is the shipped trainer's layout and its step alone. Both ranks
take a card of their own where there are two, else they share one, and then times say little. The
loss of the first step has to be the same in both rows. On a machine without a card nothing is run.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import learn_from, make_optimizer
from isthmus.sites.trainer.parallel import lay_out
from isthmus.sites.trainer.sampler import samples_of
from isthmus.topology.spec.job import Model, Trainer
from isthmus.topology.spec.workload import Parallel

RANKS = 2
CUTS = {
    "2 replicas": Parallel(data=2, zero_stage=1),
    "sequences in 2": Parallel(context=2, zero_stage=1),
}
LARGE = Model(layers=24, heads=16, width=1024, context=4096)
SMALL = Model(layers=2, heads=2, width=64, context=256)
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
"""Relative, of the first step's loss: kernels add in another order."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", choices=[*TOLERANCE], default="bf16")
    parser.add_argument("--small", action="store_true", help="a tiny model")


def run(options: argparse.Namespace) -> int:
    """Print a row for each cut; return 1 if their first losses differ."""
    if not torch.cuda.is_available():
        print("sequences in 2: not run, for this machine has no CUDA card")
        return 0
    print(f"{'':16}{'step':>9}{'memory':>12}{'first loss':>12}", flush=True)
    losses = []
    for name, cut in CUTS.items():
        found = measured(cut, options)
        losses.append(found["loss"])
        memory = found["memory_bytes"] / 2**30
        print(f"{name:16}{found['step_s']:8.3f}s{memory:9.2f}GiB{found['loss']:12.4f}", flush=True)
    is_same = math.isclose(min(losses), max(losses), rel_tol=TOLERANCE[options.precision])
    if not is_same:
        print("losses differ: cut sequences are not learnt as whole ones are")
    return 0 if is_same else 1


def measured(cut: Parallel, options: argparse.Namespace) -> dict[str, float]:
    """Return what two processes find."""
    with tempfile.TemporaryDirectory() as name:
        spawn(_rank, (Path(name), cut, options), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found: dict[str, float] = torch.load(Path(name, "0.pt"), weights_only=True)
        return found


def take_card(rank: int) -> torch.device:
    """Take a card of this rank's own, or share the only one.

    NCCL has no two ranks on one card of a host: so each says that it has a host for itself.
    """
    if torch.cuda.device_count() < RANKS:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        rank = 0
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _rank(rank: int, folder: Path, cut: Parallel, options: argparse.Namespace) -> None:
    device = take_card(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    config = Trainer(
        model=SMALL if options.small else LARGE,
        precision=options.precision,
        steps=options.steps,
        global_batch=8,
        micro_batch=2,
    )
    found = train(rank, device, cut, config)
    if rank == 0:
        torch.save(found, folder / "0.pt")
    dist.destroy_process_group()


def train(rank: int, device: torch.device, cut: Parallel, config: Trainer) -> dict[str, float]:
    """Take all steps; return their median time, the memory, and the first one's mean loss."""
    text = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    laid = lay_out(Gpt(config.model, 1).to(device), cut, config, device)
    (model,) = laid.parts
    optimizer = make_optimizer(model, config.optimizer)
    readers = laid.data_mesh.mesh.flatten().tolist()
    times, losses = [], []
    for step in range(config.steps):
        samples = samples_of(step, config.global_batch, len(readers), readers.index(rank))
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_sum, tokens = learn_from(model, text, config, samples, len(samples), laid.ring)
        optimizer.step()
        sums = torch.stack([loss_sum, torch.full_like(loss_sum, tokens)])
        dist.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))  # waits for the device
        times.append(time.perf_counter() - begin)
    is_cuda = device.type == "cuda"
    return {
        "step_s": statistics.median(times[len(times) // 2 :]),
        "memory_bytes": float(torch.cuda.max_memory_allocated(device)) if is_cuda else 0.0,
        "loss": losses[0],
    }
