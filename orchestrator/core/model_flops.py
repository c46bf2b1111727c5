"""The share of its accelerators' peak that a run reaches: model FLOPs utilisation, MFU. Pure.

Tokens times FLOPs a token, over the peak of all accelerators in the same time. Model FLOPs leave
out what is computed twice (Chowdhery et al., "PaLM", appendix B). Nothing is guessed: what is not
known has no MFU, and an estimate is said to be one.

*FLOPs a token*: the job's `model.flops_per_token`; else by the shape of the job's `workload`, or of
the shipped trainer's model; else the estimate 6 N, with N the trainable parameters of what the
script has attached (Kaplan et al., arXiv 2001.08361, section 2.1). It leaves out attention, and
counts what a token is not multiplied by: embeddings, and experts that it does not pass through.

*Tokens*: of a user's script only if it calls `site.count_tokens`.

*Peak*: what the topology says of the site's accelerator. Where ranks compute on something else than
it says, that of their own device, if the catalogue knows it by its name. `accelerator: cpu` has no
peak: there are many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.protos import metrics
from isthmus.topology.spec.compute import flops_per_sequence, peak_flops_per_s
from isthmus.topology.spec.expected_devices import DEVICES, unlike
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import workload_described
from isthmus.topology.spec.world import Site, Topology


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What a site's first rank has said of its script's model."""

    parameters: float = 0.0
    """Trainable ones, over all ranks of the site; 0: not known."""
    counts_tokens: bool = False
    """Whether the script counts its tokens. Else each rank's step counts as one."""
    device: str = ""
    """The device's own name; empty: not known."""

    @classmethod
    def of(cls, values: Mapping[str, float], labels: Mapping[str, str]) -> ModelReport:
        """Return what a metric of kind MODEL says."""
        parameters = values.get(metrics.PARAMETERS, 0.0)
        return cls(
            parameters if 0 < parameters < math.inf else 0.0,
            values.get(metrics.COUNTS_TOKENS) == 1,
            labels.get(metrics.DEVICE, ""),
        )


@dataclass(frozen=True, slots=True)
class Mfu:
    """An MFU, 0 to 1."""

    share: float
    is_estimate: bool
    """FLOPs a token are 6 N."""


def by_name(mfu: Mfu | None) -> dict[str, float]:
    """Return the share, by the metric's name; nothing if it is not known."""
    if mfu is None:
        return {}
    return {metrics.MFU_ESTIMATE if mfu.is_estimate else metrics.MFU: mfu.share}


@dataclass(frozen=True, slots=True)
class Done:
    """What one site has done."""

    tokens: float
    step_s: float
    """The time that this took."""


class ModelFlops:
    """Finds the MFU of a run's sites, and of all of them together."""

    def __init__(self, job: Job, topology: Topology) -> None:
        self._job = job
        self._sites = {site.name: site for site in topology.sites}

    def mfu(self, done: Mapping[str, Done], reports: Mapping[str, ModelReport]) -> Mfu | None:
        """Return the MFU of the sites in `done` together; None: it is not known.

        Args:
            done: By site.
            reports: By site; a site may have none.
        """
        flops = peak_flops = 0.0
        for name, each in done.items():
            report, site = reports.get(name, ModelReport()), self._sites.get(name)
            per_token = self._flops_per_token(report)
            peak = None if site is None else self._peak_flops_per_s(site, report.device)
            if site is None or per_token is None or peak is None:
                return None
            if not each.tokens > 0 or not each.step_s > 0:
                return None
            flops += per_token * each.tokens
            peak_flops += peak * site.num_ranks * each.step_s
        return Mfu(flops / peak_flops, self.flops_per_token is None) if peak_flops else None

    @property
    def knows_tokens(self) -> bool:
        """Whether the job itself says how many tokens a step has: the shipped trainer's."""
        return self._job.entrypoint is None

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of a forward and a backward pass for each token, as the job has them.

        None: it knows nothing of what its script trains.
        """
        job = self._job
        if job.flops_per_token is not None:
            return job.flops_per_token
        if job.workload is not None:
            return workload_described(job.workload).model_flops(1) / job.workload.context
        if job.entrypoint is None:
            return flops_per_sequence(job.trainer.model) / job.trainer.model.context
        return None

    def _flops_per_token(self, report: ModelReport) -> float | None:
        """Return FLOPs of each token that a site counts; None: it counts none, or not known."""
        if not self.knows_tokens and not report.counts_tokens:
            return None
        if self.flops_per_token is not None:
            return self.flops_per_token
        return 6 * report.parameters or None

    def _peak_flops_per_s(self, site: Site, device: str) -> float | None:
        """Return the peak of one of a site's accelerators."""
        job, named = self._job, site.accelerator
        is_modelled = job.entrypoint is None and job.trainer.compute == "modelled"
        if is_modelled or not device or _is_as_named(named.name, device):
            return peak_flops_per_s(named) if named.peak_flops_per_s else None
        # It brings pydantic, and most readers of a run need neither.
        from isthmus.topology.catalogue.accelerators import accelerator_of_device

        found = accelerator_of_device(device)
        return None if found is None else peak_flops_per_s(found)


def _is_as_named(accelerator: str, device: str) -> bool:
    """Whether a device is what the topology's name for it says: no CPU, whose peaks differ."""
    expected = DEVICES.get(accelerator)
    return accelerator != "cpu" if expected is None else not unlike(expected, [device])
