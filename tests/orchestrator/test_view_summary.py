"""The summary at a run's end, the loss curve, and how figures are written."""

import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.live import ASCII, BLOCKS, sparkline
from isthmus.orchestrator.evidence.view.summary import RunSummary

SUMMARY: dict[str, Any] = {
    "run_id": "r1",
    "state": "SUCCEEDED",
    "reason_code": "",
    "reason": "",
    "steps": 300,
    "verified_steps": 30,
    "losses": [[step, 8.0 - step / 50] for step in range(300)],
    "held_out_loss": 2.01,
    "unigram_entropy": 3.1,
    "tokens": 3.7e6,
    "tokens_per_s": 61234.5,
    "active_s": 123.4,
    "time_split": {"compute_s": 0.31, "intra_s": 0.03, "exposed_inter_s": 0.08, "wait_s": 0.015},
    "sites": [{"site": "oregon", "tokens_per_s": 20411.0}, {"site": "eu", "tokens_per_s": 9.5}],
    "links": [
        {
            "source": "oregon",
            "target": "frankfurt",
            "sent_bytes": 3e9,
            "raw_bytes": 12e9,
            "throughput_bytes_per_s": 30e6,
            "configured_bytes_per_s": 62.5e6,
            "rtt_s": 0.0653,
            "configured_rtt_s": 0.062,
        }
    ],
    "compression_ratio": 3.97,
    "failure": None,
}


def render(summary: dict[str, Any], width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as stream:
        Console(file=stream, width=width).print(RunSummary(summary), crop=False)
        stream.flush()
        return raw.getvalue().decode(encoding)


def rows(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_mfu_stands_by_the_speed() -> None:
    sites = [{**SUMMARY["sites"][0], "mfu_estimate": 0.4}, SUMMARY["sites"][1]]
    found = rows(render({**SUMMARY, "mfu": None, "mfu_estimate": 0.35, "sites": sites}))
    assert ["speed", "61.2k tokens/s, 3.7M tokens, MFU 35% est."] in found
    assert ["oregon", "20.4k", "40% est."] in found
    assert ["eu", "9.5", "-"] in found


def test_a_run_that_succeeded() -> None:
    curve = "8.0000 ███▇▇▇▇▇▇▆▆▆▆▆▅▅▅▅▅▅▄▄▄▄▄▄▃▃▃▃▃▂▂▂▂▂▂▁▁▁ 2.0200"
    assert rows(render(SUMMARY)) == [
        ["run r1 SUCCEEDED after 300 steps in 2min 3s"],
        ["loss", curve],
        ["held-out loss", "2.0100", "(unigram entropy 3.1000)"],
        ["speed", "61.2k tokens/s, 3.7M tokens"],
        ["a step", "all", "435ms"],
        ["compute", "310ms", "71%"],
        ["inside sites", "30ms", "6.9%"],
        ["WAN, exposed", "80ms", "18%"],
        ["waiting for others", "15ms", "3.4%"],
        ["sent", "2.79GiB"],
        ["compression", "3.97x"],
        ["parameters", "equal at all sites, checked after 30 steps"],
        [""],
        ["site", "tokens/s"],
        ["oregon", "20.4k"],
        ["eu", "9.5"],
        [""],
        ["link", "throughput", "configured", "use", "sent", "ratio", "RTT", "set to"],
        [
            "oregon → frankfurt",
            "240Mbit/s",
            "500Mbit/s",
            "48%",
            "2.79GiB",
            "4.00x",
            "65.3ms",
            "62ms",
        ],
    ]


def test_no_path_is_broken_and_what_was_stopped_is_told_once() -> None:
    path = "/home/somebody/" + "/".join(f"folder-of-a-run-{at}" for at in range(8)) + "/rank1.log"
    noted = [
        {"wall_s": 1.0, "kind": "run.stopping", "site": "", "text": "all sites are stopped: why"},
        {"wall_s": 1.0, "kind": "site.trouble", "site": "eu", "text": f"site eu: see {path}"},
        {"wall_s": 1.0, "kind": "site.trouble", "site": "us", "text": f"site us: see {path}"},
    ]
    text = render(
        {
            "state": "FAILED",
            "reason_code": "X",
            "reason": f"why: {path}",
            "noted": noted,
            "sites": [{"site": "eu"}, {"site": "us"}],
        }
    )
    assert text.count(path) == 2
    assert text.count("(and 1 other)") == 1
    assert "stopped" not in text


def test_each_site_that_was_slow_is_named() -> None:
    period = {
        "site": "eu",
        "since_step": 3,
        "last_step": 9,
        "cost_s": 0.5,
        "share": 0.25,
        "total_s": 3.5,
        "for_s": 14.0,
    }
    slow = [{**period, "is_over": True}, {**period, "site": "us", "is_over": False}]
    text = " ".join(render({**SUMMARY, "slow_sites": slow}).split())
    assert "site eu cost the others 500ms a step (25%) from step 3 to 9" in text
    assert "site us costs the others 500ms a step (25%) since step 3" in text


def test_uncounted_tokens_are_no_rate() -> None:
    found = rows(render({**SUMMARY, "counts_tokens": False}))
    assert ["speed", "4.96 steps/s"] in found
    assert ["oregon"] not in found, "a table of names alone says nothing"


def test_every_missing_or_odd_figure_is_left_out() -> None:
    nothing = dict.fromkeys(SUMMARY)
    assert render(nothing).splitlines() == ["run"]
    assert render({}).splitlines() == ["run"]
    for key in SUMMARY:
        render({**SUMMARY, key: None})
    gaps = {**SUMMARY, "losses": [[0, None], [1, math.nan], [2, 1.5]], "tokens_per_s": math.inf}
    text = render(gaps)
    assert "loss           -   ▁ 1.5000" in text
    assert "tokens/s, " not in text


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    assert max(len(line) for line in render(SUMMARY, width).splitlines()) <= width


def test_a_stream_that_knows_ascii_only_gets_ascii() -> None:
    text = render(SUMMARY, encoding="ascii")
    assert "?" not in text
    assert "oregon -> frankfurt" in text
    assert "8.0000 ###***" in text


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 10, ""),
        ([1.0], 10, "▁"),
        ([1.0, 1.0, 1.0], 10, "▁▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, BLOCKS),
        ([7, 6, 5, 4, 3, 2, 1, 0], 8, BLOCKS[::-1]),
        ([0, 0, 7, 7], 2, "▁█"),
        ([0, None, 7], 10, "▁ █"),
        ([0, math.nan, 7, math.inf], 10, "▁ █ "),
        ([None, None], 10, "  "),
        ([1, 2, 3], 0, ""),
    ],
)
def test_sparkline(values: list[float | None], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), max_size=200), st.integers(0, 60))
def test_a_sparkline_never_exceeds_its_width(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width, ASCII)
    assert len(drawn) == min(len(values), width)
    assert set(drawn) <= {*ASCII, " "}


@pytest.mark.parametrize(
    ("style", "value", "text"),
    [
        (formats.count, 0, "0"),
        (formats.count, 9.5, "9.5"),
        (formats.count, 999.4, "999"),
        (formats.count, 999.6, "1k"),
        (formats.count, 12345, "12.3k"),
        (formats.count, 4.5e15, "4500T"),
        (formats.size, 1023, "1023B"),
        (formats.size, 100, "100B"),
        (formats.size, 3e9, "2.79GiB"),
        (formats.rate, 125e6, "1Gbit/s"),
        (formats.rate, 20.83e6, "167Mbit/s"),
        (formats.share, 0.128, "13%"),
        (formats.share, 0.0346, "3.5%"),
        (formats.share, 0, "0%"),
        (formats.duration, 0, "0s"),
        (formats.duration, 0.03124, "31.2ms"),
        (formats.duration, 9.996, "10s"),
        (formats.duration, 59.7, "1min 0s"),
        (formats.duration, 7325, "2h 2min"),
    ],
)
def test_figures(style: Callable[[float], str], value: float, text: str) -> None:
    assert style(value) == text


@given(st.floats(0, 1e30))
def test_every_figure_can_be_written(value: float) -> None:
    for style in (formats.count, formats.size, formats.rate, formats.share, formats.duration):
        assert style(value)
