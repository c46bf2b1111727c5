"""What a step should take by the topology's figures alone, and how far the measured one is from it.

Pure.

- exchange off: a site's compute time; sites do not wait for each other, so the mean over them.
- else as topology/timing/step_time.py has it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from orchestrator.evidence.bench.record import Predicted
from topology.codec_costs import RATIOS
from topology.cost.compute import site_shares, step_compute_s
from topology.job import Job
from topology.timing.step_time import step_time
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
    shares = [sum(site_shares(job, topology, site)) for site in topology.sites]
    if job.exchange.schedule == "off":
        return by_themselves(by_site_s, step_s)
    # What was measured is a mean over all links: of several codecs it says nothing about one.
    is_known = bool(job.exchange.codecs) or job.exchange.codec in RATIOS
    predicted = step_time(job, topology, None if is_known else wire_ratio)
    return together(shares, by_site_s, predicted.exchange_s, predicted.step_s, step_s)


def by_themselves(alone_s: Sequence[float], step_s: float) -> Predicted:
    """Return the prediction for sites that exchange nothing; arguments as of `together`."""
    mean_s = math.fsum(alone_s) / len(alone_s)
    return Predicted(
        compute_s=mean_s,
        exchange_s=0.0,
        step_s=mean_s,
        efficiency=1.0,
        deviation=step_s / mean_s - 1,
    )


def together(
    shares: Sequence[float],
    alone_s: Sequence[float],
    exchange_s: float,
    expected_s: float,
    step_s: float,
) -> Predicted:
    """Return the prediction for sites that wait for each other.

    Args:
        shares: of a step's work, each site's, in any unit.
        alone_s: each site's step by itself.
        exchange_s: if nothing hid it.
        expected_s: the step of all.
        step_s: as it was measured or simulated.
    """
    alone = math.fsum(share / site_s for share, site_s in zip(shares, alone_s, strict=True))
    return Predicted(
        compute_s=max(alone_s),
        exchange_s=exchange_s,
        step_s=expected_s,
        efficiency=math.fsum(shares) / expected_s / alone,
        deviation=step_s / expected_s - 1,
    )
