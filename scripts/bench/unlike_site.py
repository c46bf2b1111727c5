"""What a site of `unlike` runs: it learns for real, and computes for as long as it is told to.

Arguments: SITE=SECONDS of each site, for a sample. Each step's gradient is computed for real first.
Then forward and backward pass by as time, in which a rank sleeps, and hand it out layer by layer
(isthmus/sites/trainer/modelled.py). What was computed for real is part of that time, so a machine
of two cores can be three sites of any speed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import isthmus
from isthmus.protos import metrics
from isthmus.sites.trainer.corpus import load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import (
    evaluate,
    make_optimizer,
    sequences,
    token_losses,
)
from isthmus.sites.trainer.modelled import ComputeClock, ModelledGpt, real_pass, take_modelled_step
from isthmus.sites.trainer.sampler import random_starts
from isthmus.topology.spec.compute import LayerTime


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    site = isthmus.join()
    config = site.job.trainer
    corpus = load_corpus(config.data, Path(), config.model.context)
    num_starts = len(corpus.training) - config.model.context
    sample_s = float(dict(argument.split("=") for argument in sys.argv[1:])[site.name])
    num_layers = config.model.layers + 2
    layer_time = LayerTime(
        forward_s=sample_s / 3 / num_layers, backward_s=sample_s / 1.5 / num_layers
    )
    gpt = Gpt(config.model, config.seed)
    real_pass(gpt, corpus.training, config, np.arange(config.micro_batch))
    parameters = [*gpt.parameters()]
    gradients = [each.grad for each in parameters if each.grad is not None]
    clock = ComputeClock()
    model = DistributedDataParallel(ModelledGpt(gpt, [layer_time] * num_layers, clock))
    optimizer = make_optimizer(model, config.optimizer)
    site.attach(model, optimizer)
    sampler = site.sampler(range(num_starts), seed=config.seed)
    site.checkpoint(model, optimizer)
    for step in site.steps(config.steps):
        clock.begin()  # a round's wait for others hides no compute
        samples = sampler.draw()
        site.count_tokens(len(samples) * config.model.context)
        starts = random_starts(config.seed, samples, num_starts)
        batch = sequences(corpus.training, starts, config.model.context, site.device)
        loss = token_losses(gpt, batch).mean()
        for kept, gradient in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
            kept.copy_(gradient)
        take_modelled_step(model, optimizer, clock, config, step, samples)
        site.log(**{metrics.LOSS: loss})
    with site.global_parameters():
        loss_sum, tokens = evaluate(gpt, corpus.held_out, config, ranks=1, rank=0)
    found = {metrics.HELD_OUT_LOSS: loss_sum / tokens}
    site.record(metrics.EVALUATION, site.num_steps, found)


if __name__ == "__main__":
    main()
