"""What counts as faithful, which settings are measured, and that they can be."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from tests.fakes.worlds import topology
from tests.tools import emulation_check
from tests.tools.emulation_check import (
    GRID_BITS_PER_S,
    GRID_RTTS_S,
    Effort,
    Figure,
    allowed_rtt_s,
    grid,
    opened,
    scene_of,
)

EFFORT = Effort(window_s=0.05, datagrams=2000)


def a_figure(expected: float, measured: float, allowed: float) -> Figure:
    return Figure(
        link="a -> b",
        setting="",
        what="RTT",
        unit="s",
        expected=expected,
        measured=measured,
        allowed=allowed,
    )


def test_a_figure_is_good_within_what_is_allowed() -> None:
    assert a_figure(0.020, 0.0209, allowed_rtt_s(0.020, 0)).is_good
    assert not a_figure(0.020, 0.0211, allowed_rtt_s(0.020, 0)).is_good
    assert a_figure(0.150, 0.1529, allowed_rtt_s(0.150, 0)).is_good
    assert not a_figure(0.150, 0.1531, allowed_rtt_s(0.150, 0)).is_good
    assert a_figure(1, 9, math.inf).is_good, "not judged"


def test_the_grid_has_every_round_trip_with_every_rate() -> None:
    scenes = grid(is_quick=False, has_loss=True)
    settings = {
        (scene.rtt_s(pair), scene.link("a", "b").bytes_per_s * 8)
        for scene in scenes
        for pair in scene.pairs
        if pair.rate and pair.beside is None
    }
    assert settings == {(rtt_s, rate) for rtt_s in GRID_RTTS_S for rate in GRID_BITS_PER_S}
    losses = [scene.link("a", "b").loss for scene in scenes if scene.pairs[0].loss]
    assert losses == [0.001, 0.01]
    assert [scene.pairs[0].beside for scene in scenes if scene.pairs[0].beside] == [("a", "c")]
    assert len(grid(is_quick=True, has_loss=False)) < len(scenes) / 3


def test_of_a_topology_every_link_is_measured() -> None:
    lossy = topology(3)
    links = (dataclasses.replace(lossy.links[0], loss=0.01), *lossy.links[1:])
    scene = scene_of(dataclasses.replace(lossy, links=links), has_loss=True)
    assert len(scene.pairs) == 6
    assert [pair.loss for pair in scene.pairs].count(True) == 1


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("is_netns", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_real_links_are_measured(is_netns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_netns and (why := netns_problem()):
        pytest.skip(why)
    monkeypatch.setattr(emulation_check, "MIN_PIECE_S", 0.02)
    monkeypatch.setattr(emulation_check, "WARM_S", 0.1)
    scenes = grid(is_quick=True, has_loss=is_netns)
    scene = next(each for each in scenes if each.pairs[0].beside)
    if is_netns:
        pair = dataclasses.replace(scenes[-1].pairs[0], rate=True)
        scene = dataclasses.replace(scenes[-1], pairs=(pair,))

    async def story() -> list[Figure]:
        async with opened(scene, is_netns=is_netns) as bench:
            return [figure async for figure in bench.measure(EFFORT)]

    measured = asyncio.run(asyncio.wait_for(story(), 60))

    # How well it does is said by emulation_check.py: here other tests run beside it.
    whats = [figure.what.partition(",")[0] for figure in measured]
    assert whats[:3] == ["RTT", "1 connection", "4 connections"]
    assert whats[3:] == (["loss"] if is_netns else [])
    assert all(math.isfinite(figure.measured) and figure.measured > 0 for figure in measured)
    assert measured[0].measured > 0.9 * measured[0].expected, "the delay is there"
