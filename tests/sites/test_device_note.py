"""A rank that computes on another device than the topology says tells so, once a site."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.protos import metrics
from isthmus.sites.node.outages import is_outage
from isthmus.sites.worker.api.joining import _check_device, _compare_device
from isthmus.topology.spec.job import Job, Trainer
from tests.fakes.ranks import run_spec
from tests.fakes.worlds import topology


def told(*, accelerator: str = "h100-sxm", rank: int = 0, job: Job, **world: Any) -> list[Any]:  # noqa: ANN401
    """Return what a rank records that computes on a CPU."""
    described = topology(2)
    chip = dataclasses.replace(described.sites[0].accelerator, name=accelerator)
    sites = tuple(dataclasses.replace(site, accelerator=chip) for site in described.sites)
    recorded: list[Any] = []
    site = SimpleNamespace(
        name="a",
        rank=rank,
        device=torch.device("cpu"),
        topology=dataclasses.replace(described, sites=sites, **world),
        job=job,
        record=lambda *fields: recorded.append(fields),
    )
    _compare_device(site)  # type: ignore[arg-type]
    return recorded


REAL = Job(name="j", topology="t.yaml")
MODELLED = dataclasses.replace(REAL, trainer=Trainer(compute="modelled"))


def test_the_first_rank_of_a_site_tells_what_it_found() -> None:
    found = told(job=REAL, emulate=False)
    assert found == [(metrics.DEVICE_DIFFERS, 0, {}, {metrics.FOUND: "a CPU"})]


@pytest.mark.parametrize("device", ["a CPU", "NVIDIA L40S"])
@pytest.mark.parametrize("allow_cpu", [False, True])
@pytest.mark.parametrize(
    ("accelerator", "emulate"), [("h100-sxm", False), ("h100-sxm", True), ("core", False)]
)
def test_a_rank_without_its_accelerator_ends_unless_cpus_are_allowed(
    accelerator: str, emulate: bool, allow_cpu: bool, device: str
) -> None:
    spec = run_spec([1, 1], ["allow_cpu=true"] if allow_cpu else [])
    first = spec.topology.sites[0]
    chip = dataclasses.replace(first.accelerator, name=accelerator)
    site = dataclasses.replace(first, accelerator=chip)
    spec = dataclasses.replace(
        spec, topology=dataclasses.replace(spec.topology, sites=(site,), emulate=emulate)
    )
    if (accelerator, emulate, allow_cpu, device) != ("h100-sxm", False, False, "a CPU"):
        _check_device(site.name, spec, device)
        return
    with pytest.raises(OSError, match=r"says h100-sxm at site site0.*--allow-cpu") as raised:
        _check_device(site.name, spec, device)
    assert is_outage(raised.value), "the site's, and not the script's"


@pytest.mark.parametrize(
    "fields",
    [
        {"job": REAL, "emulate": True},
        {"job": REAL, "emulate": False, "rank": 1},
        {"job": REAL, "emulate": False, "accelerator": "cpu"},
        {"job": REAL, "emulate": False, "accelerator": "core"},
        {"job": MODELLED, "emulate": False},
    ],
)
def test_nothing_is_told_where_nothing_else_is_expected(fields: dict[str, Any]) -> None:
    assert told(**fields) == []
