"""Modelled compute: parameters, FLOPs and seconds of the model that ships."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.sites.trainer import sampler
from isthmus.sites.trainer.gpt import Gpt
from isthmus.topology.spec.compute import (
    flops_per_sequence,
    layer_times,
    layers,
    num_parameters,
    rate_flops_per_s,
    site_shares,
    step_compute_s,
)
from isthmus.topology.spec.job import Job, Model, Trainer
from tests.fakes.worlds import topology

SMALL = Model(layers=2, heads=2, width=8, context=16)


def job(model: Model = SMALL, global_batch: int = 7) -> Job:
    trainer = Trainer(model=model, global_batch=global_batch)
    return Job(name="j", topology="t.yaml", trainer=trainer)


@pytest.mark.parametrize("model", [SMALL, Model(), Model(layers=1, heads=1, width=32, context=8)])
def test_layers_have_the_parameters_of_the_model(model: Model) -> None:
    gpt = Gpt(model, seed=0)
    assert num_parameters(model) == sum(each.numel() for each in gpt.parameters())
    block = sum(each.numel() for each in gpt.blocks[0].parameters())
    assert [sum(layer.numels) for layer in layers(model)[1:-1]] == [block] * model.layers


def test_flops_by_hand() -> None:
    # Each block multiplies by 12 * 8 * 8 + 4 * 8 = 800 numbers, the head by 2 * 8 + 256 * 8 = 2064.
    parameters = 2 * 800 + 2064
    attention = 12 * 2 * 8 * 16
    assert flops_per_sequence(SMALL) == 16 * (6 * parameters + attention)


def test_forward_takes_a_third() -> None:
    (site, _) = topology().sites
    times = layer_times(job(), site, 3)
    assert len(times) == 4  # embedding, two blocks, head
    assert (times[0].forward_s, times[0].backward_s) == (0.0, 0.0)
    assert all(each.backward_s == 2 * each.forward_s for each in times)
    total_s = sum(each.forward_s + each.backward_s for each in times)
    assert total_s == pytest.approx(3 * flops_per_sequence(SMALL) / (50e9 * 0.3))


@pytest.mark.parametrize(
    ("peaks", "chosen"),
    [({"fp32": 2.0, "bf16": 8.0}, 8.0), ({"fp64": 1.0, "fp32": 2.0}, 2.0), ({"fp8": 9.0}, 9.0)],
)
def test_the_peak_of_the_dtype_that_training_uses(peaks: dict[str, float], chosen: float) -> None:
    accelerator = topology().sites[0].accelerator
    changed = dataclasses.replace(accelerator, peak_flops_per_s=peaks, mfu=0.5)
    assert rate_flops_per_s(changed) == chosen / 2


def test_a_step_takes_what_the_busiest_rank_takes() -> None:
    world = topology(2, ranks=2)
    first, second = world.sites
    assert (site_shares(job(), world, first), site_shares(job(), world, second)) == ((1, 2), (2, 2))
    one_s = flops_per_sequence(SMALL) / (50e9 * 0.3)
    assert step_compute_s(job(), world, first) == pytest.approx(2 * one_s)


@pytest.mark.slow
@settings(max_examples=50)
@given(batch=st.integers(1, 200), num_sites=st.integers(2, 4), ranks=st.integers(1, 5))
def test_shares_are_the_sampler_s(batch: int, num_sites: int, ranks: int) -> None:
    world = topology(num_sites, ranks=ranks)
    shares = [each for site in world.sites for each in site_shares(job(SMALL, batch), world, site)]
    assert shares == [
        len(sampler.samples_of(3, batch, num_sites * ranks, rank))
        for rank in range(num_sites * ranks)
    ]
