"""Scales and ticks, places on the map, lanes: the pure parts under the drawings."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.orchestrator.evidence.report.charts import linear, logarithmic, rounded, ticks
from isthmus.orchestrator.evidence.report.html import Markup, element, join, shortened
from isthmus.orchestrator.evidence.report.sitemap import latitude, lay_out, longitude
from isthmus.orchestrator.evidence.trace_events import assign_lanes
from isthmus.orchestrator.runs.facts import SiteFacts

SPANS = st.tuples(st.floats(-1e9, 1e9, allow_nan=False), st.floats(1e-6, 1e9, allow_nan=False))


@given(SPANS, st.integers(2, 10))
def test_ticks_lie_inside_and_are_few(span: tuple[float, float], wanted: int) -> None:
    low, high = span[0], span[0] + span[1]
    if high - low < abs(low) * 1e-6:
        return  # no scale is that narrow: floats do not tell its ticks apart
    found = ticks(low, high, wanted)
    slack = (high - low) * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert found == sorted(set(found))
    assert len(found) <= wanted + 1


def test_ticks_are_where_a_person_would_put_them() -> None:
    assert ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(0, 40, 6) == [0, 10, 20, 30, 40]
    assert ticks(2.31, 5.2, 5) == [3, 4, 5]
    assert ticks(-125, -67, 6) == [-120, -110, -100, -90, -80, -70]


def test_scales() -> None:
    scale = linear(10, 20)
    assert (scale(10), scale(15), scale(20)) == (0, 0.5, 1)
    same = linear(3, 3)
    assert 0 < same(3) < 1
    wide = rounded(2.31, 5.2)
    assert (wide.low, wide.high) == (2, 6)
    scale = logarithmic([0.08, 0.005, 0.02, 0.02])
    assert scale.ticks == (0.005, 0.02, 0.08)
    assert scale(0.02) == pytest.approx(0.5)
    assert logarithmic([5.0])(5.0) == pytest.approx(0.5)


def site(name: str, lat: float | None = None, lon: float | None = None) -> SiteFacts:
    return SiteFacts(site=name, lat=lat, lon=lon, num_ranks=2, accelerator="cpu")


def test_a_map_has_north_above_and_east_right() -> None:
    layout = lay_out([site("oregon", 45.6, -121.2), site("virginia", 39.0, -77.5)])
    assert layout.is_map
    (west_x, north_y), (east_x, south_y) = layout.places["oregon"], layout.places["virginia"]
    assert 0.05 < west_x < east_x < 0.95
    assert 0.05 < north_y < south_y < 0.95
    assert "100°W" in [words for _, words in layout.meridians]


def test_a_map_over_the_date_line_is_the_short_way() -> None:
    layout = lay_out([site("tokyo", 35.7, 139.7), site("honolulu", 21.3, -157.9)])
    assert layout.places["tokyo"][0] < layout.places["honolulu"][0]
    assert "180°W" in [words for _, words in layout.meridians]


@pytest.mark.parametrize("seed", range(20))
def test_every_located_site_is_inside_the_map(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 12)
    sites = [
        site(str(at), chance.uniform(-90, 90), chance.uniform(-180, 180)) for at in range(count)
    ]
    for x, y in lay_out(sites).places.values():
        assert 0 <= x <= 1, f"{seed=}"
        assert 0 <= y <= 1, f"{seed=}"


def test_without_a_location_sites_stand_on_a_circle() -> None:
    layout = lay_out([site("a", 1, 2), site("b"), site("c")])
    assert not layout.is_map
    assert len(set(layout.places.values())) == 3


def test_degrees() -> None:
    assert [latitude(lat) for lat in (45, 0, -10.5)] == ["45°N", "0°", "10.5°S"]
    assert [longitude(lon) for lon in (-120, 0, 190)] == ["120°W", "0°", "170°W"]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_spans_of_a_lane_overlap(seed: int) -> None:
    chance = random.Random(seed)
    spans = []
    for _ in range(60):
        begin = chance.uniform(0, 10)
        spans.append((begin, begin + chance.choice([0.0, chance.uniform(0, 2)])))
    lanes = assign_lanes(spans)
    by_lane = [
        sorted(span for span, own in zip(spans, lanes, strict=True) if own == lane)
        for lane in set(lanes)
    ]
    for one, other in itertools.chain.from_iterable(map(itertools.pairwise, by_lane)):
        assert one[1] <= other[0], f"{seed=}"
    edges = [begin for begin, _ in spans]
    most = max(sum(begin <= at < end for begin, end in spans) for at in edges)
    assert most <= len(by_lane) <= most + 1, f"{seed=}"


def test_what_is_not_markup_is_escaped() -> None:
    evil = "<script>\"&'\u202e\x00"
    text = element("p", evil, title=evil)
    assert text == ('<p title="&lt;script&gt;&quot;&amp;&#x27;  ">&lt;script&gt;"&amp;\'  </p>')
    assert join("<", Markup("<b>"), None) == "&lt;<b>"
    assert element("input", checked=True, disabled=False, width=1 / 3) == (
        '<input checked width="0.333">'
    )
    assert shortened("montreal", 5) == "mont…"
