"""A probe's documents, its figures, and how they get into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.evidence.link_probe import (
    Direction,
    FileChangedError,
    directions,
    estimate_s,
    link_figures,
    longest_s,
    probing_pair,
    read_directions,
    replace_text,
)
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.topology.documents.editing import with_measured
from isthmus.topology.documents.load import load_topology
from isthmus.topology.documents.run_documents import check_pair
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Probe
from isthmus.topology.text.yaml_document import read_document, read_with_overrides

TOPOLOGY = """\
version: 1
name: t
sites:
  - {name: a, nodes: 2, accelerators_per_node: 8, accelerator: h100-sxm}
  - {name: b, like: a}
  - {name: c, like: a}
links:
  - {between: [a, b], bandwidth: 100Mbit/s, rtt: 20ms, share: 0.5} # half is ours
  - {between: [b, c], bandwidth: 1Gbit/s, distance: 1000km, measured: {bandwidth: 500Mbit/s}}
  - {between: [a, c], bandwidth: 1Gbit/s, rtt: 5ms, oneway: true}
"""
AT = "2026-05-01T12:00:00Z"


def record(source: str, target: str, **values: float) -> dict[str, Any]:
    figures = {"rtt_s_p50": 0.021, "rtt_s_p99": 0.025, "jitter_s": 0.002, "bytes_per_s_16": 6e6}
    return {
        "kind": "probe",
        "labels": {"source": source, "target": target},
        "values": {**figures, "bytes_per_s_1": 5e6, **values},
    }


def measured(*records: dict[str, Any], emulator: str | None = None) -> list[Direction]:
    pairs = [(each["labels"]["source"], each["labels"]["target"]) for each in records]
    others = [{"kind": "link", "labels": {}, "values": {}}]
    return read_directions([*others, *records], load_topology(TOPOLOGY, "t"), pairs, emulator)


def test_the_job_says_what_to_measure_and_fits_the_topology(tmp_path: Path) -> None:
    path = tmp_path / "it's.yaml"
    path.write_text(TOPOLOGY)
    probe = Probe(connections=(1, 4), echoes=30, window_s=0.25)
    pair = probing_pair(path, ["links.0.rtt=50ms"], probe)
    assert (pair.job.probe, pair.job.topology) == (probe, "it's.yaml")
    link = pair.topology.link("a", "b")
    assert link is not None
    assert link.rtt_s == 0.05
    check_pair(
        pair.job, pair.topology, read_with_overrides(pair.job_document.written, "probe.yaml", ())
    )
    assert directions(pair.topology) == [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
    assert 0 < estimate_s(pair.topology, probe) < longest_s(pair.topology, probe)


def test_figures_stand_beside_what_is_described_or_emulated() -> None:
    (real,) = measured(record("a", "b"))
    (emulated,) = measured(record("a", "b"), emulator="netns")
    assert (real.configured_bytes_per_s, emulated.configured_bytes_per_s) == (12.5e6, 6.25e6)
    (drifted,) = measured(record("b", "c"))
    assert drifted.configured_bytes_per_s == 125e6
    assert real.bytes_per_s == {1: 5e6, 16: 6e6}
    assert real.bandwidth_bytes_per_s == 6e6


@pytest.mark.parametrize(
    ("segments", "lost", "emulator", "loss"),
    [
        (10_000, 50, None, 0.005),
        (10_000, 4, None, None),
        (20_000, 0, "netns", 0.0),
        (20_000, 50, "relay", None),
    ],
)
def test_losses_are_told_where_there_are_enough_and_tcp_goes_through(
    segments: int, lost: int, emulator: str | None, loss: float | None
) -> None:
    found = record("a", "b", segments=segments, lost_segments=lost)
    assert measured(found, emulator=emulator)[0].loss == loss


def test_a_missing_direction_is_told() -> None:
    with pytest.raises(MeasurementError, match="no figures of the link from b to a"):
        read_directions([record("a", "b")], load_topology(TOPOLOGY, "t"), [("b", "a")], None)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rtt_s_p50": float("nan")}, "rtt_s_p50 is no amount: nan"),
        ({"rtt_s_p99": "late"}, "rtt_s_p99 is no amount: 'late'"),
        ({"jitter_s": -1.0}, "jitter_s is no amount"),
        ({"bytes_per_s_x": 5.0}, "bytes_per_s_x is no rate over a number of connections"),
        ({"bytes_per_s_1": 0.0, "bytes_per_s_16": 0}, "nothing came through"),
    ],
)
def test_figures_that_are_none_are_told_with_their_link(values: dict[str, Any], told: str) -> None:
    with pytest.raises(MeasurementError, match=f"the link from a to b: {told}"):
        measured(record("a", "b", **values))


def test_records_of_something_else_are_passed_over() -> None:
    world, pairs = load_topology(TOPOLOGY, "t"), [("a", "b")]
    others: list[Any] = [7, {"kind": "probe"}, {"kind": "probe", "labels": [], "values": {}}]
    found = read_directions([*others, record("a", "b")], world, pairs, None)
    assert [each.source for each in found] == ["a"]


def figures_of(*found: Direction, is_emulated: bool = False) -> dict[int, dict[str, str]]:
    document = read_document(TOPOLOGY, "t")
    world = load_topology(TOPOLOGY, "t")
    return link_figures(document, world, found, at=AT, is_emulated=is_emulated)


def test_a_links_figures_are_those_of_its_worse_direction() -> None:
    back = record(
        "b",
        "a",
        bytes_per_s_1=3e6,
        bytes_per_s_16=5e6,
        rtt_s_p50=0.023,
        jitter_s=0.0,
        segments=1000.0,
    )
    back["values"]["lost_segments"] = 20.0
    found = measured(record("a", "b"), back)
    expected = {
        "bandwidth": "40Mbit/s",
        "rtt": "22ms",
        "jitter": "2ms",
        "loss": "2%",
        "at": AT,
    }
    assert figures_of(*found) == {0: expected}
    # An emulated link is as narrow as its share; the file's figure is of the whole.
    assert figures_of(*found, is_emulated=True)[0]["bandwidth"] == "80Mbit/s"


def test_what_is_written_is_read_as_measured() -> None:
    found = measured(record("b", "c"), record("c", "b"))
    text = with_measured(TOPOLOGY, "t", figures_of(*found))
    link = load_topology(text, "t").link("c", "b")
    assert link is not None
    assert (link.bytes_per_s, link.rtt_s, link.rtt_origin) == (6e6, 0.021, "measured")
    assert (link.jitter_s, link.measured_at) == (0.002, AT)
    assert "# half is ours" in text


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode_and_mark(tmp_path: Path) -> None:
    path, link = tmp_path / "t.yaml", tmp_path / "link.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\n")
    path.chmod(0o640)
    link.symlink_to(path)
    replace_text(link, link.read_bytes(), "a: 2\r\n")
    assert path.read_bytes() == b"\xef\xbb\xbfa: 2\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.yaml", "t.yaml"]


def test_a_file_that_somebody_changed_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("a: 1\n")
    path.write_text("mine\n")
    with pytest.raises(FileChangedError, match="was changed meanwhile"):
        replace_text(path, b"a: 1\n", "a: 2\n")
    assert path.read_text() == "mine\n"
    assert [each.name for each in tmp_path.iterdir()] == ["t.yaml"]


def test_mistakes_of_the_topology_are_told_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(TOPOLOGY.replace("20ms", "20"))
    with pytest.raises(ConfigError, match="without a unit"):
        probing_pair(path, [], Probe())
