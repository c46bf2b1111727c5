"""What a step should take by the topology's figures alone, and how far the measured one is from it. Pure.

- exchange off: a site's compute time; sites do not wait for each other, so the mean over them.
- serial: topology/serial_step.py. For equal sites that is compute, then the exchange: c + x(G), with
  x(b) the time of an exchange of b bytes (topology/wire_time.py) and G the whole gradient.
- overlap: gradients are ready layer by layer while the last micro-batch goes backward, and leave when
  they fill a bucket. The WAN takes them in that order and pauses only when there is nothing to send:
  max over releases k of (t(k) + x(all gradients from k on)), where k is released at t(k).

Collectives inside a site, the optimizer's step, and CPU time of codecs are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from orchestrator.bench.record import Predicted
from topology.compute import (
    layer_times,
    layers,
    num_parameters,
    site_shares,
    step_compute_s,
)
from topology.job import Job
from topology.serial_step import serial_step_s
from topology.wire_load import RATIOS
from topology.wire_time import exchange_time_s
from topology.world import Site, Topology

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
        slowest = topology.sites[by_site_s.index(compute_s)]
        exchange_s, expected_s = _exchange(job, topology, slowest, wire_ratio)
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
    job: Job, topology: Topology, slowest: Site, wire_ratio: float | None
) -> tuple[float, float]:
    """Return the time of one exchange by itself, and that of the step with it."""
    compute_s = step_compute_s(job, topology, slowest)
    num_sequences = max(site_shares(job, topology, slowest))
    gradient_bytes = FLOAT32_BYTES * num_parameters(job.trainer.model)
    ratio = None if job.exchange.codec in RATIOS else wire_ratio
    exchange_s = exchange_time_s(job, topology, gradient_bytes, ratio)
    if job.exchange.schedule == "serial":
        return exchange_s, serial_step_s(job, topology, gradient_bytes, ratio)
    left_bytes, expected_s = gradient_bytes, compute_s
    for ready_s, num_bytes in _releases(job, slowest, num_sequences):
        left_s = exchange_time_s(job, topology, left_bytes, ratio)
        expected_s = max(expected_s, compute_s - ready_s + left_s)
        left_bytes -= num_bytes
    return exchange_s, expected_s


def _releases(job: Job, site: Site, num_sequences: int) -> Iterator[tuple[float, int]]:
    """Yield how long before the end of a rank's backward pass gradients leave, and their bytes.

    Args:
        job: Of the run.
        site: Whose accelerators compute.
        num_sequences: Of the rank, in the whole step.
    """
    # Only the last micro-batch's backward pass hands over: those before it are summed first.
    last = (num_sequences - 1) % job.trainer.micro_batch + 1
    times = layer_times(job, site, last)
    before_end_s = math.fsum(each.backward_s for each in times)
    num_bytes = 0
    for layer, each in reversed(list(zip(layers(job.trainer.model), times, strict=True))):
        before_end_s -= each.backward_s
        num_bytes += FLOAT32_BYTES * layer.parameters
        if num_bytes >= job.exchange.bucket_bytes or layer.name == times[0].name:
            yield max(0.0, before_end_s), num_bytes
            num_bytes = 0


_COMPRESSING = ("split", "bf16-split")
