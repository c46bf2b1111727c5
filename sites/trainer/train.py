"""The loop of one rank: the same in every rank of every site."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from isthmus.protos import metrics
from isthmus.sites.trainer.compiling import as_written, check_can_compile
from isthmus.sites.trainer.corpus import Corpus, load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learners import CutLearner, Learner, ReplicaLearner, replicated
from isthmus.sites.trainer.learning import StepResult, apply_gradients
from isthmus.sites.trainer.modelled import ComputeClock, ModelledGpt, real_pass, take_modelled_step
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.topology.spec.compute import layer_times, rank_share, step_compute_s
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Trainer
from isthmus.topology.spec.trainer_cuts import is_cut

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SAY_EVERY_STEPS = 10


def train(site: Site, folder: Path) -> None:
    """Train the job's model with all other sites, from the first step to the last.

    Args:
        site: Just joined; the caller leaves.
        folder: What relative names of text files are relative to.

    Raises:
        ConfigError: the job or the text is wrong here, or another site has other text.
        IsthmusError: the exchange failed.
    """
    config = site.job.trainer
    _check_job(site)
    corpus = load_corpus(config.data, folder, config.model.context)
    _make_deterministic(site.device)
    _check_text(site, corpus)
    model = Gpt(config.model, config.seed).to(site.device)
    if config.compute == "modelled":
        _let_time_pass(site, model, corpus)
    elif is_cut(site.job):
        _learn(site, CutLearner(site, model, corpus), corpus)
    else:
        _learn(site, ReplicaLearner(site, model, corpus), corpus)


def _let_time_pass(site: Site, model: Gpt, corpus: Corpus) -> None:
    """Take the job's steps in modelled time. Nothing is evaluated, for nothing is learnt."""
    config = site.job.trainer
    clock = ComputeClock()
    own = site.topology.site(site.name)
    part = rank_share(site.job, site.topology, own, site.rank)
    loss = real_pass(model, corpus.training, config, np.arange(part.start, part.stop))
    modelled = ModelledGpt(model, layer_times(site.job, own, 1), clock)
    parallel, optimizer = replicated(site, modelled)
    step_s = step_compute_s(site.job, site.topology, own)
    _say(
        site, f"modelled compute: {step_s:.3f} s a step; the loss, {loss:.3f}, is of one real pass"
    )
    sampler = _sampler(site, corpus)
    site.checkpoint(parallel, optimizer)
    clock.begin()
    for step in site.steps(config.steps):
        samples = sampler.draw()
        site.count_tokens(len(samples) * config.model.context)
        rate = take_modelled_step(parallel, optimizer, clock, config, step, samples)
        if site.job.regime.is_open:
            clock.begin()  # a round's wait for others hides no compute
        site.log(**{metrics.LEARNING_RATE: rate, **({metrics.LOSS: loss} if step == 0 else {})})
        if (step + 1) % SAY_EVERY_STEPS == 0:
            _say(site, f"step {step + 1}")


def _learn(site: Site, learner: Learner, corpus: Corpus) -> None:
    """Take the job's steps, and evaluate between them."""
    config = site.job.trainer
    _say(site, f"{corpus.num_files} files, {len(corpus.training):,} bytes to learn from")
    sampler = _sampler(site, corpus, learner.data_mesh)
    start = site.checkpoint(learner.saved, learner.optimizer)
    if start > 0:
        _say(site, f"goes on after step {start}")
    for step in site.steps(config.steps):
        samples = sampler.draw()
        site.count_tokens(len(samples) * learner.own_tokens)
        scaled = _scaled(config, site.learning_rate_scale)
        learner.optimizer.zero_grad()
        loss_sum, tokens = learner.learn(samples, sampler.most)
        norm, rate = apply_gradients(learner.clip, learner.optimizer, scaled, step)
        _log_step(site, step, StepResult(float(loss_sum), tokens, norm, rate))
        done = site.num_steps
        if done // config.evaluate_every > step // config.evaluate_every or done == config.steps:
            _log_evaluation(site, done, learner, corpus)


def _scaled(config: Trainer, scale: float) -> Trainer:
    """Return the settings with other learning rates: each step sets its own."""
    optimizer = config.optimizer
    scaled = replace(
        optimizer,
        learning_rate=optimizer.learning_rate * scale,
        min_learning_rate=optimizer.min_learning_rate * scale,
    )
    return replace(config, optimizer=scaled)


def _sampler(site: Site, corpus: Corpus, data_mesh: DeviceMesh | None = None) -> Sampler:
    """Return what hands out positions; where in the text one begins, sites/trainer/sampler.py."""
    num_starts = len(corpus.training) - site.job.trainer.model.context
    return site.sampler(range(num_starts), seed=site.job.trainer.seed, data_mesh=data_mesh)


def _check_job(site: Site) -> None:
    """Refuse a batch that leaves some rank without a sequence, and what this device cannot do."""
    batch, ranks = site.job.trainer.global_batch, site.global_world_size
    if batch < ranks and not site.job.placement:
        message = f"{batch} sequences for {ranks} ranks: want at least one for each"
        raise ConfigError([Problem("job", 0, 0, message, "trainer.global_batch")])
    if site.job.trainer.offload and site.device.type == "cpu":
        message = f"site {site.name} computes on the host: there is nothing to offload from"
        raise ConfigError([Problem("job", 0, 0, message, "trainer.offload")])
    if site.job.trainer.compile:
        check_can_compile(site.name)


def _make_deterministic(device: torch.device) -> None:
    """Make equal inputs give equal bits, run after run."""
    if device.type == "cuda":
        # cuBLAS reads it when its first handle is made; without it, torch refuses to multiply.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _check_text(site: Site, corpus: Corpus) -> None:
    """Check that all ranks of all sites have the same text: the first one's digest says which."""
    told = nn.Module()
    digest = torch.frombuffer(bytearray(corpus.digest), dtype=torch.uint8)
    told.register_buffer("digest", digest.to(site.device))
    site.broadcast(told)
    first = bytes(told.get_buffer("digest").cpu().tolist())
    if first != corpus.digest:
        message = (
            f"rank {site.rank} of site {site.name} has other text than the run's first rank: "
            f"{corpus.num_files} files with digest {corpus.digest.hex()[:12]} here, "
            f"{first.hex()[:12]} there. Give every node of every site the same files; without any "
            "named, the same version of Python"
        )
        raise ConfigError([Problem("job", 0, 0, message, "trainer.data.files")])


def _log_step(site: Site, step: int, result: StepResult) -> None:
    """Send the record of a step, which counts from 0."""
    loss = _site_mean(site, result.loss_sum, result.tokens)
    site.log(
        **{
            metrics.LOSS: loss,
            metrics.GRAD_NORM: result.grad_norm,
            metrics.LEARNING_RATE: result.learning_rate,
        }
    )
    if (step + 1) % SAY_EVERY_STEPS == 0:
        _say(site, f"step {step + 1}: loss {loss:.3f}")


def _log_evaluation(site: Site, step: int, learner: Learner, corpus: Corpus) -> None:
    """Evaluate where text is held out; send what was found, and what the text is."""
    values = {metrics.UNIGRAM_ENTROPY: corpus.unigram_entropy}
    if len(corpus.held_out):
        with site.global_parameters(), as_written(site.job.trainer):
            found = learner.evaluate()
        held_out_loss = _site_mean(site, *found)
        values[metrics.HELD_OUT_LOSS] = held_out_loss
        entropy = f"(counting bytes: {corpus.unigram_entropy:.3f})"
        _say(site, f"step {step}: held-out loss {held_out_loss:.3f} {entropy}")
    if site.rank == 0:
        site.record(metrics.EVALUATION, step, values, {"corpus": corpus.digest.hex()})


def _site_mean(site: Site, loss_sum: float, tokens: int) -> float:
    """Return the mean over the tokens of all ranks of the site. A collective of the site."""
    sums = torch.tensor([loss_sum, tokens], dtype=torch.float64, device=site.device)
    if site.world_size > 1:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    return float(total / count)


def _say(site: Site, text: str) -> None:
    """Write a line to the log, once a site."""
    if site.rank == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
