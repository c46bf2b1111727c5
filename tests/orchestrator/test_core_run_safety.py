"""Whatever happens in whichever order, a run is safe and ends."""

import random

import pytest

from orchestrator.core import events
from orchestrator.core.states import RunState
from tests.fakes.run_worlds import COLLECT_S, GRACE_S, LEASE_S, World, digest, failure, prepared

WAN_ANSWERS = ([events.NamespacesOpened({})], [events.NamespacesRefused("there is no TUN")])


def random_event(draw: random.Random, world: World, risk: float) -> events.Event:
    site = draw.choice(world.sites)
    code = draw.choice(("RANK_EXITED", "PEER_LOST", "GATEWAY_EXITED"))
    failures = (failure(world, code, site, draw.random(), is_collateral=draw.random() < 0.3),)
    rare: list[events.Event] = [
        events.SiteLost(site, f"site {site}: gone", draw.random()),
        events.AgentEnded(site, "status 1", ""),
        events.SiteEnded(site, False, failures),
        events.SiteEnded(site, succeeded=False),
        events.CancelRequested("by hand"),
        events.EmulatorEnded("status 1"),
        *draw.choice(WAN_ANSWERS),
        digest(site, draw.choice((1, 1, 1, 2))),
    ]
    common: list[events.Event] = [
        events.SiteJoined(site, "h"),
        prepared(site),
        events.SiteRunning(site),
        events.RelayOpened({}),
        events.Ticked(),
        *([events.SiteEnded(site, succeeded=True)] if draw.random() < 0.3 else []),
    ]
    return draw.choice(rare if draw.random() < risk else common)


def check_safety(world: World, seed: int) -> None:
    """Nothing that a run must never do was done."""
    finishes = [place for place, a in enumerate(world.actions) if isinstance(a, events.FinishRun)]
    assert len(finishes) <= 1, f"two outcomes, {seed=}"
    assert finishes in ([], [len(world.actions) - 1]), f"something after the end, {seed=}"
    told_to_prepare: set[str] = set()
    told_to_start: set[str] = set()
    told_to_stop: set[str] = set()
    seen: set[str] = set()
    gone: set[str] = set()
    over = {"site.ended", "site.lost", "site.unconfirmed"}
    for action in world.actions:
        match action:
            case events.RecordEvent(kind="site.prepared", site=site):
                seen.add(site)
            case events.RecordEvent(kind=kind, site=site) if kind in over:
                gone.add(site)
            case events.SendPrepare(site):
                assert site not in told_to_prepare, f"{seed=}"
                told_to_prepare.add(site)
            case events.SendStart(site):
                assert seen == set(world.sites), f"Start before all were prepared, {seed=}"
                assert site not in told_to_start, f"{seed=}"
                assert not told_to_stop, f"Start after Stop, {seed=}"
                told_to_start.add(site)
            case events.SendStop(site):
                assert site in told_to_prepare, f"{seed=}"
                told_to_stop.add(site)
            case events.FinishRun(state):
                assert told_to_prepare <= gone, f"a site may still have processes, {seed=}"
                if state is RunState.SUCCEEDED:
                    assert told_to_start == set(world.sites), f"{seed=}"
    assert told_to_start in (set(), set(world.sites)), f"a part of the sites was started, {seed=}"


@pytest.mark.parametrize("emulate", [False, True])
def test_in_every_order_of_events_a_run_is_safe_and_ends(emulate: bool) -> None:
    outcomes = set()
    for seed in range(400):
        draw = random.Random(seed)
        world = World(draw.choice((2, 3)), emulate=emulate)
        risk = draw.choice((0.0, 0.05, 0.1, 0.3))
        for _ in range(draw.choice((15, 40, 80))):
            world.now_s += draw.choice((0.0, 0.0, 0.01, 0.5))
            new = world.tell(random_event(draw, world, risk))
            if events.OpenNamespaces() in new:
                world.tell(*draw.choice(WAN_ANSWERS))
            if new:
                check_safety(world, seed)
        world.tell(events.CancelRequested("enough"))
        world.wait(COLLECT_S)
        world.wait(GRACE_S + LEASE_S)
        check_safety(world, seed)
        assert world.machine.state.is_terminal, f"it never ends, {seed=}"
        outcomes.add(world.finish.state)
        stopped = set(world.sent(events.SendStop))
        ended = {
            action.site
            for action in world.actions
            if isinstance(action, events.RecordEvent) and action.kind in {"site.ended", "site.lost"}
        }
        assert set(world.sent(events.SendPrepare)) <= stopped | ended, f"{seed=}"
    assert outcomes == {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}
