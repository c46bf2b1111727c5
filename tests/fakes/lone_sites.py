"""A site of one rank in this process, which is all of a run or thinks that there are others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from isthmus.sites.local.rank_messages import Welcome
from isthmus.sites.worker.api.environment import lone_spec
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.topology.spec.job import Exchange, Job
from isthmus.topology.spec.regime import Regime
from tests.fakes.lone_exchanges import RecordingLink


def lone_site(
    link: RecordingLink,
    num_sites: int = 1,
    *,
    averages: bool = True,
    exchange: Exchange | None = None,
    regime: Regime | None = None,
    device: str = "cpu",
    rate: str | None = None,
    rungs: tuple[Regime, ...] = (),
) -> Site:
    """A real site of one rank whose link records.

    With `rate` the job has `on_fewer_sites: shrink`, and that. `rungs` are the regimes to which the
    run may change.
    """
    welcome = Welcome(
        site="only",
        site_index=0,
        sites=("only", "b", "c")[:num_sites],
        ranks_per_site=(1,) * num_sites,
        verify_every=2,
        config_hash="",
    )
    job = Job(
        name="test",
        topology="",
        timeline_every=0,
        exchange=exchange or Exchange(),
        regime=regime or Regime(),
        on_fewer_sites="keep" if rate is None else "shrink",
        rate=rate or "linear",
    )
    context = RankContext(
        welcome=welcome,
        spec=dataclasses.replace(lone_spec(1), job=job, rungs=rungs),
        run_folder=Path(),
        device=torch.device(device),
        averages=averages,
    )
    return Site(context, link, owns_group=False)
