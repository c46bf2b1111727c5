"""The decisions about one run whose WAN is emulated."""

from orchestrator.core import events
from orchestrator.core.events import Endpoint
from tests.fakes.run_worlds import COLLECT_S, World, prepared, recorded_events

NAMESPACES = {
    site: events.Namespace("/proc/1/ns/user", f"/proc/1/fd/{ord(site)}", f"10.0.0.{ord(site)}")
    for site in "ab"
}


def test_namespaces_come_before_prepare() -> None:
    world = World(2, emulate=True)
    world.join()
    assert world.actions.count(events.OpenNamespaces()) == 1
    world.tell(events.SiteLost("b", "gone"), events.NamespacesOpened(NAMESPACES))
    assert world.sent(events.SendPrepare) == [], "only one site is there"
    world.tell(events.SiteJoined("b", "h"))
    told = [each for each in world.actions if isinstance(each, events.SendPrepare)]
    assert {each.site: each.namespace for each in told} == NAMESPACES
    world.tell(prepared("a"), prepared("b"))
    assert world.sent(events.SendStart) == ["a", "b"], "no relay is needed"
    assert world.actions.count(events.OpenNamespaces()) == 1
    assert [each for each in world.actions if isinstance(each, events.OpenRelay)] == []


def test_without_namespaces_there_is_the_relay_and_a_line_that_says_so() -> None:
    world = World(2, emulate=True)
    world.join()
    world.tell(events.NamespacesRefused("there is no TUN"), events.NamespacesRefused("again"))
    (recorded,) = [a for a in recorded_events(world) if a.kind == "wan.fallback"]
    assert "no slow start, congestion control or retransmission" in str(recorded.detail["note"])
    assert str(recorded.detail["note"]).endswith("because there is no TUN")
    assert world.sent(events.SendPrepare) == ["a", "b"]
    world.tell(prepared("a"), prepared("b"))
    assert len([each for each in world.actions if isinstance(each, events.OpenRelay)]) == 1


def test_namespaces_that_were_asked_for_are_not_replaced() -> None:
    world = World(2, emulate=True, emulator="netns")
    world.join()
    world.tell(events.NamespacesRefused("there is no TUN"))
    world.wait(COLLECT_S)
    assert world.finish.reason_code == "LAUNCH_FAILED"
    assert "netns was asked for, and cannot be here: there is no TUN" in world.finish.reason
    assert world.sent(events.SendPrepare) == []


def test_the_relay_comes_between_prepare_and_start() -> None:
    world = World(2, emulate=True, emulator="relay")
    world.prepare()
    (opened,) = [a for a in world.actions if isinstance(a, events.OpenRelay)]
    assert [endpoint.site for endpoint in opened.endpoints] == ["a", "b"]
    assert world.sent(events.SendStart) == []
    book = {"a": (Endpoint("b", 0, "127.0.0.1", 1),), "b": (Endpoint("a", 0, "127.0.0.1", 2),)}
    started = [s for s in world.tell(events.RelayOpened(book)) if isinstance(s, events.SendStart)]
    assert {start.site: start.endpoints for start in started} == book
    world.tell(events.EmulatorEnded("it ended with SIGKILL", "/run/coordinator.log"))
    world.wait(COLLECT_S)
    assert world.sent(events.SendStop) == ["a", "b"]
    world.tell(*(events.SiteEnded(site, succeeded=False) for site in "ab"))
    assert world.finish.reason_code == "LAUNCH_FAILED", "killed from outside: no bug of ours"
    assert world.finish.reason == "the WAN emulator is gone: it ended with SIGKILL"
    assert world.finish.failure is not None
    assert world.finish.failure.log_path == "/run/coordinator.log"
