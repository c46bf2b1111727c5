"""What a step should take by the topology's figures alone, and how far the measured one is from it. Pure.

- exchange off: a site's compute time; sites do not wait for each other, so the mean over them.
- serial: the slowest site's compute, then the exchange: c + x(G), with x(b) the time of an exchange
  of b bytes (topology/wire_time.py) and G the whole gradient.
- overlap: buckets cross while the backward pass, two thirds of c, goes on. Whichever is slower
  decides: the WAN, which begins when the first of n buckets is ready and then never pauses, or the
  accelerator, after whose last bucket one more exchange remains:
  max(c / 3 + 2 c / 3 n + x(G), c + x(G / n)).

Collectives inside a site, the optimizer's step, and CPU time of codecs are left out.
"""

from __future__ import annotations

import dataclasses
import math

from orchestrator.bench.record import Predicted
from topology.compute import num_parameters, site_shares, step_compute_s
from topology.job import Job
from topology.wire_time import RATIOS, exchange_time_s
from topology.world import Topology

FLOAT32_BYTES = 4


def predict(
    job: Job, topology: Topology, emulator: str, wire_ratio: float | None, step_s: float
) -> Predicted | None:
    """Return the prediction for a step that was measured to take `step_s`.

    None where the model's times say nothing: compute is real, or the script is the user's own.

    Args:
        job: Of the run.
        topology: Of the run.
        emulator: That it ran with: only `relay` has no packets, and so no headers.
        wire_ratio: Bytes sent for each byte of float32, as measured: codecs that compress do so by
            what gradients hold.
        step_s: Mean over sites and steps.
    """
    if job.trainer.compute != "modelled" or job.entrypoint is not None:
        return None
    topology = dataclasses.replace(topology, emulator=emulator, emulate=emulator == "relay")
    by_site_s = [step_compute_s(job, topology, site) for site in topology.sites]
    if job.exchange.schedule == "off":
        compute_s = expected_s = math.fsum(by_site_s) / len(by_site_s)
        exchange_s, efficiency = 0.0, 1.0
    else:
        compute_s = max(by_site_s)
        exchange_s, expected_s = _exchange(job, topology, wire_ratio, compute_s)
        shares = [sum(site_shares(job, topology, site)) for site in topology.sites]
        alone = math.fsum(share / site_s for share, site_s in zip(shares, by_site_s, strict=True))
        efficiency = job.trainer.global_batch / expected_s / alone
    return Predicted(
        compute_s=compute_s,
        exchange_s=exchange_s,
        step_s=expected_s,
        efficiency=efficiency,
        deviation=step_s / expected_s - 1,
    )


def _exchange(
    job: Job, topology: Topology, wire_ratio: float | None, compute_s: float
) -> tuple[float, float]:
    """Return the time of one exchange by itself, and that of the step with it."""
    gradient_bytes = FLOAT32_BYTES * num_parameters(job.trainer.model)
    ratio = None if job.exchange.codec in RATIOS else wire_ratio
    exchange_s = exchange_time_s(job, topology, gradient_bytes, ratio)
    if job.exchange.schedule == "serial":
        return exchange_s, compute_s + exchange_s
    num_buckets = math.ceil(gradient_bytes / job.exchange.bucket_bytes)
    last_s = exchange_time_s(job, topology, math.ceil(gradient_bytes / num_buckets), ratio)
    first_s = compute_s / 3 + 2 * compute_s / 3 / num_buckets
    return exchange_s, max(first_s + exchange_s, compute_s + last_s)
