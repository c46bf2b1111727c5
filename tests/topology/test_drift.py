"""What a probe measured against what the topology describes."""

import pytest

from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.measured_links import drifts
from tests.topology.documents import TOPOLOGY, changed


def measured(figures: str, link: str = "bandwidth: 10Gbit/s, rtt: 62ms") -> list[str]:
    text = changed(TOPOLOGY, "bandwidth: 10Gbit/s, rtt: 62ms", f"{link}, measured: {figures}")
    text = changed(
        text, "    measured: {bandwidth: 0.9Gbit/s, rtt: 14ms", "    measured: {jitter: 1ms"
    )
    return [str(each) for each in drifts(load_topology(text, "t"))]


@pytest.mark.parametrize(
    "figures",
    [
        "{}",
        "{bandwidth: 8.01Gbit/s}",
        "{bandwidth: 11.9Gbit/s, rtt: 74ms, at: 2026-05-01}",
        "{rtt: 50ms, loss: 5%, jitter: 40ms}",
    ],
)
def test_up_to_a_fifth_is_no_drift(figures: str) -> None:
    assert measured(figures) == []


def test_more_than_a_fifth_is_told_once_for_both_directions() -> None:
    assert measured("{bandwidth: 4Gbit/s, rtt: 93ms, at: 2026-05-01T12:00:00Z}") == [
        "oregon to virginia: bandwidth 4Gbit/s was measured at 2026-05-01T12:00:00Z, 10Gbit/s is "
        "described (-60%): the measured figure is used",
        "oregon to virginia: rtt 93ms was measured at 2026-05-01T12:00:00Z, 62ms is described "
        "(+50%): the measured figure is used",
    ]


def test_an_rtt_is_compared_with_what_the_locations_give() -> None:
    (told,) = measured("{rtt: 200ms}", "bandwidth: 10Gbit/s")
    assert told.startswith("oregon to virginia: rtt 200ms was measured, 56.79ms is described")


def test_what_is_only_measured_has_nothing_to_differ_from() -> None:
    text = changed(TOPOLOGY, "    bandwidth: 1Gbit/s\n", "")
    text = changed(text, "    distance: 500km\n", "")
    text = changed(text, "rtt: 14ms", "rtt: 900ms")
    text = changed(text, ", location: {lat: 39.0, lon: -77.5}", "")
    assert drifts(load_topology(text, "t")) == ()


def test_the_share_counts_on_both_sides() -> None:
    world = load_topology(TOPOLOGY, "t")  # 1Gbit/s described, 0.9 measured, share 0.8
    link = world.link("virginia", "ohio")
    assert link is not None
    assert (link.bytes_per_s, link.described_bytes_per_s) == (0.72e9 / 8, 0.8e9 / 8)
    # 500 km give 10.8 ms; 14 ms were measured.
    assert [each.what for each in drifts(world)] == ["rtt"]
