"""Why a run waits: its sites have runs that go on, or others are before it."""

from isthmus.orchestrator.cli.queue import waits_of
from isthmus.protos.control.v1 import control_pb2


def test_a_run_waits_for_who_has_its_sites_and_who_is_before_it_there() -> None:
    runs = [
        control_pb2.Run(
            run_id=run_id, position=position, sites=[control_pb2.SiteStatus(site=s) for s in sites]
        )
        for run_id, position, sites in (
            ("goes-on", 0, "ab"),
            ("long", 1, "bc"),
            ("short", 2, "c"),
            ("last", 3, "abc"),
        )
    ]
    assert waits_of(runs) == {
        "goes-on": {},
        "long": {"goes-on": ["b"]},
        "short": {"long": ["c"]},
        "last": {"goes-on": ["a", "b"], "long": ["c"]},
    }
