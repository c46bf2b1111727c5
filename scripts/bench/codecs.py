"""Measure every codec on gradients of the shipped trainer: ratio, error, and GB/s of float32.

The gradients are those of the last of `--steps` steps of the default model. Ratio and error are of
all of them, in chunks; the speeds are the best of one chunk's. "with feedback" is what a gateway
does for a lossy codec: add the residual, encode, keep what that lost. "by torch" is what a rank
does instead, here on the processor: the same, but for zstd.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from isthmus.protos.frame import Kind
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.reduction.residuals import BucketResiduals
from isthmus.sites.local.rank_messages import EncodingOffer
from isthmus.sites.trainer.corpus import load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import make_optimizer, take_step
from isthmus.sites.worker.exchange.device_codecs import DEVICE_CODECS
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from isthmus.topology.spec.job import Trainer


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--chunk-mib", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")


def run(options: argparse.Namespace) -> None:
    """Print a row a codec."""
    gradient = trained_gradient(options.steps)
    numel = int(options.chunk_mib * (1 << 18))
    chunks = [gradient[start : start + numel] for start in range(0, len(gradient), numel)]
    figures = ("ratio", "relative error", "encode GB/s", "decode GB/s", "with feedback GB/s")
    table = Table(Column("codec", no_wrap=True), *figures, "by torch")
    for name, codec in BY_NAME.items():
        table.add_row(name, *row(codec, chunks, options.seconds))
    Console().print(table)


def trained_gradient(steps: int) -> Floats:
    """Return the clipped gradient of the last step, flat: float32, all parameters."""
    torch.set_num_threads(1)
    config = Trainer(steps=steps, global_batch=16, micro_batch=16)
    corpus = load_corpus(config.data, Path(), config.model.context)
    model = Gpt(config.model, config.seed)
    optimizer = make_optimizer(model, config.optimizer)
    for step in range(steps):
        first = step * config.global_batch
        samples = np.arange(first, first + config.global_batch)
        take_step(model, optimizer, corpus.training, config, step, samples)
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    flat: Floats = torch.cat(gradients).numpy()
    return flat


def encoding_by_torch(name: str, shard: torch.Tensor) -> Callable[[], object]:
    """Return what encodes a shard of one chunk, and what it lost the time before."""
    numel = len(shard)
    offer = EncodingOffer(codecs=(name,), turns=(0,), chunk_numel=numel, error_feedback=True)
    encoder = ShardEncoder(
        offer, site_index=0, rank=0, ranks_per_site=(1,), device=torch.device("cpu")
    )
    return functools.partial(encoder.encode, shard, bucket=0, numel=numel, layout=0)


def row(codec: Codec, chunks: list[Floats], seconds: float) -> list[str]:
    """Return a codec's figures, as the table's columns say."""
    payloads = [codec.encode(chunk) for chunk in chunks]
    decoded = [
        codec.decode(payload, len(chunk)) for payload, chunk in zip(payloads, chunks, strict=True)
    ]
    meant = np.concatenate(chunks)
    error = float(np.linalg.norm(np.concatenate(decoded) - meant) / np.linalg.norm(meant))
    values, payload = chunks[0].copy(), payloads[0]
    works: list[Callable[[], object]] = [
        functools.partial(codec.encode, values),
        functools.partial(codec.decode, payload, len(values), np.empty_like(values)),
    ]
    if not codec.lossless:
        residuals = BucketResiduals(layout=0, numel=len(values))
        works.append(functools.partial(residuals.encode, 0, Kind.CONTRIBUTION, codec, values))
    if codec.name in DEVICE_CODECS:
        works.append(encoding_by_torch(codec.name, torch.from_numpy(values.copy())))
    speeds = [f"{values.nbytes / best_s(work, seconds) / 1e9:.2f}" for work in works]
    return [f"{meant.nbytes / sum(map(len, payloads)):.3f}", f"{error:.5f}", *speeds]


def best_s(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest of as many calls as fit into `seconds`."""
    best, end_s = float("inf"), time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        work()
        best = min(best, time.perf_counter() - began_s)
    return best
