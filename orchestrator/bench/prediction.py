"""What a step should take by the topology's figures alone, and how far the measured one is from it. Pure.

- exchange off: a site's compute time; sites do not wait for each other, so the mean over them.
- else as topology/step_time.py has it.
"""

from __future__ import annotations

import dataclasses
import math

from orchestrator.bench.record import Predicted
from topology.codec_costs import RATIOS
from topology.compute import site_shares, step_compute_s
from topology.job import Job
from topology.step_time import step_time
from topology.world import Topology


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
    # What is emulated stays so: such sites may buffer more than a host's TCP.
    is_emulated = topology.emulate or emulator == "relay"
    topology = dataclasses.replace(topology, emulator=emulator, emulate=is_emulated)
    by_site_s = [step_compute_s(job, topology, site) for site in topology.sites]
    if job.exchange.schedule == "off":
        compute_s = expected_s = math.fsum(by_site_s) / len(by_site_s)
        exchange_s, efficiency = 0.0, 1.0
    else:
        compute_s = max(by_site_s)
        # What was measured is a mean over all links: of several codecs it says nothing about one.
        is_known = bool(job.exchange.codecs) or job.exchange.codec in RATIOS
        ratio = None if is_known else wire_ratio
        predicted = step_time(job, topology, ratio)
        exchange_s, expected_s = predicted.exchange_s, predicted.step_s
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
