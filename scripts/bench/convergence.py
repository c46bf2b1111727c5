"""Train the shipped model at two sites with each codec; compare what they learn with fp32.

Both sites are in this one process: each step, their unequal shares of the batch go through the
model one after the other, and their gradients through the gateways' own reduction machines, codecs
and residuals. The links between are function calls; everything else is what a run does. "fp32, one
site" is the same training with the gradient of the whole batch at once: what it differs by is
noise. The learning rate is half the default and decays to nearly nothing: with the default,
rounding in the last bit already moves the final loss by 0.2 %, and no codec could be told from
another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.protos.frame import pack, unpack
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.codecs.registry import BY_NAME, codec_named
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    Own,
    Received,
    Send,
    roles,
)
from isthmus.sites.gateway.reduction.residuals import Residuals
from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.trainer import sampler
from isthmus.sites.trainer.corpus import Bytes, Corpus, load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import (
    clip_gradients,
    evaluate,
    make_optimizer,
    sequences,
    set_learning_rate,
    token_losses,
)
from isthmus.sites.worker.data.data_positions import Positions
from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.job import Exchange, Model, Optimizer, Trainer
from isthmus.topology.spec.reduction_plan import ReductionPlan, star

SHARES = ((0, 10), (10, 16))
"""Samples of the batch, by site: unequal."""
WHOLE = ((0, 16),)
PLANS = {"gather": ReductionPlan(2, (), ""), "star": ReductionPlan(2, (star(2, 0),), "")}
ALONE = ReductionPlan(1, (), "")
BUCKET_NUMEL = Exchange().bucket_bytes // 4
CHUNK_NUMEL = Exchange().chunk_bytes // 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each, averaged")
    parser.add_argument("--codec", action="append", choices=CODECS, default=[])
    parser.add_argument("--tree", choices=PLANS, default="gather")


def run(options: argparse.Namespace) -> None:
    """Print a row a codec."""
    torch.set_num_threads(1)
    configs = [configuration(options.steps, seed) for seed in range(1, options.seeds + 1)]
    corpus = load_corpus(configs[0].data, Path(), configs[0].model.context)
    names = options.codec or [
        name for name, codec in BY_NAME.items() if not codec.lossless and not name.endswith("-zstd")
    ]
    print("codec               loss    against fp32, each seed           smaller by")
    baselines: list[float] = []
    for setting in settings(names):
        plan = ALONE if setting.shares == WHOLE else PLANS[options.tree]
        trained = [train(setting, plan, corpus, config) for config in configs]
        losses = [loss for loss, _ in trained]
        baselines = baselines or losses
        ratios = [loss / baseline - 1 for loss, baseline in zip(losses, baselines, strict=True)]
        sent = "" if setting.shares == WHOLE else f"{trained[0][1]:.2f}"
        seeds = " ".join(f"{ratio:+.2%}" for ratio in ratios)
        print(
            f"{setting.name:18}  {fmean(losses):.4f}  {fmean(ratios):+.2%}  {seeds:34}  {sent}",
            flush=True,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One training."""

    name: str
    codec: str
    error_feedback: bool
    shares: tuple[tuple[int, int], ...] = SHARES


@dataclass(slots=True)
class Wan:
    """The sites' reduction machines, and a wire without delay."""

    setting: Setting
    plan: ReductionPlan
    residuals: list[Residuals]
    wire_bytes: int = 0
    """Payloads of all sites."""

    def reduce(self, round_: int, parts: list[Floats], weights: list[float]) -> None:
        """Replace each site's sum of gradients by the mean over all tokens, bucket by bucket."""
        for index, start in enumerate(range(0, len(parts[0]), BUCKET_NUMEL)):
            bucket_parts = [part[start : start + BUCKET_NUMEL] for part in parts]
            self._reduce_bucket(round_, index, bucket_parts, weights)
        for part in parts:
            assert part.tobytes() == parts[0].tobytes(), "the sites differ"

    def _reduce_bucket(
        self, round_: int, index: int, parts: list[Floats], weights: list[float]
    ) -> None:
        codecs = (codec_named(self.setting.codec),) * max(1, len(self.plan.trees))
        cut = grid(len(parts[0]), CHUNK_NUMEL, (1,) * len(parts))
        bucket = Bucket(1, round_, index, 1, codecs, cut, time.thread_time)
        sites = []
        for site, kept in enumerate(self.residuals):
            residual = kept.bucket(index, 1, cut.numel) if self.setting.error_feedback else None
            sites.append(BucketReduction(bucket, self.plan, roles(self.plan, site), residual))
        for chunk in range(cut.num_chunks):
            start, count = cut.span(chunk)
            events: list[tuple[int, Own | Received]] = [
                (site, Own(part[start : start + count], weights[site]))
                for site, part in enumerate(parts)
            ]
            for site, event in events:  # grows while it is gone through
                for action in sites[site].chunk(chunk).handle(event):
                    if isinstance(action, Send):
                        self.wire_bytes += len(action.frame.payload)
                        frame = unpack(pack(action.frame))  # a copy: the part is overwritten
                        events.append((action.site, Received(site, frame)))


def train(
    setting: Setting, plan: ReductionPlan, corpus: Corpus, config: Trainer
) -> tuple[float, float]:
    """Return the final held-out loss, and how many times smaller than fp32 what was sent is."""
    model = Gpt(config.model, config.seed)
    optimizer = make_optimizer(model, config.optimizer)
    wan = Wan(setting, plan, [Residuals() for _ in setting.shares])
    parameters = list(model.parameters())
    for step in range(config.steps):
        set_learning_rate(optimizer, config, step)
        parts, weights = [], []
        for first, last in setting.shares:
            samples = np.arange(
                step * config.global_batch + first, step * config.global_batch + last
            )
            weights.append(float(len(samples) * config.model.context))
            parts.append(gradient_sum(model, corpus.training, config, samples))
        wan.reduce(step, parts, weights)
        for parameter, piece in pieces(parameters, torch.from_numpy(parts[0])):
            parameter.grad = piece
        clip_gradients(parameters, config.optimizer.clip_norm)
        optimizer.step()
    loss_sum, tokens = evaluate(model, corpus.held_out, config, ranks=1, rank=0)
    raw_bytes = 4 * sum(parameter.numel() for parameter in parameters) * config.steps
    return loss_sum / tokens, len(setting.shares) * raw_bytes / max(1, wan.wire_bytes)


def gradient_sum(model: nn.Module, text: Bytes, config: Trainer, samples: Positions) -> Floats:
    """Return the gradient of the summed loss of some samples, flat, float32."""
    model.zero_grad()
    starts = sampler.random_starts(config.seed, samples, len(text) - config.model.context)
    batch = sequences(text, starts, config.model.context, torch.device("cpu"))
    losses = token_losses(model, batch)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    flat = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    gradient: Floats = torch.cat(flat).numpy().astype(np.float32)
    return gradient


def pieces(parameters: list[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with its part of a flat gradient."""
    start = 0
    for parameter in parameters:
        yield parameter, flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def settings(codecs: list[str]) -> list[Setting]:
    """Return what is trained: fp32 twice, each codec, and int4 and topk without feedback too."""
    found = [
        Setting("fp32", "fp32", error_feedback=True),
        Setting("fp32, one site", "fp32", error_feedback=True, shares=WHOLE),
    ]
    for name in codecs:
        found.append(Setting(name, name, error_feedback=True))
        if name in ("int4", "topk"):
            found.append(Setting(f"{name}, no feedback", name, error_feedback=False))
    return found


def configuration(steps: int, seed: int) -> Trainer:
    """Return a training that takes seconds and ends at about the same loss, however rounded."""
    return Trainer(
        steps=steps,
        global_batch=16,
        micro_batch=16,
        evaluation_batches=64,
        seed=seed,
        model=Model(layers=2, heads=4, width=64, context=64),
        optimizer=Optimizer(learning_rate=3e-3, min_learning_rate=3e-5),
    )
