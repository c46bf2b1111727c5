"""What bytes between sites cost: by link, step, day and run, wherever prices are described."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from isthmus.orchestrator.core.run_record import RunRecord
from isthmus.orchestrator.evidence.view.egress import PRICE, egress_of
from isthmus.orchestrator.evidence.view.live import LiveTable
from isthmus.orchestrator.evidence.view.summary import RunSummary
from isthmus.orchestrator.runs.facts import DAY_S, link_facts, summarise
from tests.cli.runs import a_run

USD_PER_BYTE = 2e-11
LINK: dict[str, Any] = {
    "source": "a",
    "target": "b",
    "sent_bytes": 1e12,
    "raw_bytes": 4e12,
    PRICE: USD_PER_BYTE,
}
FREE: dict[str, Any] = {"source": "b", "target": "a", "sent_bytes": 9e12, "raw_bytes": 9e12}


def rendered(what: Any) -> str:  # noqa: ANN401 - whatever rich prints
    console = Console(file=io.StringIO(), width=160)
    console.print(what, crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_has_a_price_so_far_a_step_and_a_day() -> None:
    found = egress_of([LINK, FREE], active_s=3600.0, step_s=1.8, codec="int8")
    assert found is not None
    assert found.usd == pytest.approx(20.0)
    assert found.usd_per_step == pytest.approx(0.01)
    assert found.usd_per_day == pytest.approx(480.0)
    assert found.line() == (
        "$20.00, $0.01 a step, $480.00 a day; int8 instead of fp32 saves $1440.00 a day"
    )
    link = link_facts({"source": "a", "target": "b", **LINK}, LINK, active_s=3600.0, step_s=1.8)
    assert link.egress_usd == pytest.approx(20.0)
    assert link.egress_usd_per_day == pytest.approx(480.0)
    assert link.egress_usd_per_step == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("link", "codec", "said"),
    [
        (LINK, "fp32", ""),
        ({**LINK, "raw_bytes": 1.001e12}, "split", ""),
        ({**LINK, "raw_bytes": None}, "int8", ""),
        (LINK, "", "each link's codec instead of fp32 saves $1440.00 a day"),
    ],
)
def test_a_codec_that_saves_nothing_is_not_compared(
    link: dict[str, Any], codec: str, said: str
) -> None:
    found = egress_of([link], active_s=3600.0, step_s=None, codec=codec)
    assert found is not None
    assert found.comparison() == said
    assert "a step" not in found.line()


@pytest.mark.parametrize(("links", "active_s"), [([FREE], 9.0), ([], 9.0), ([LINK], None)])
def test_without_a_price_or_a_time_there_is_no_price(
    links: list[dict[str, Any]], active_s: float | None
) -> None:
    assert egress_of(links, active_s=active_s, step_s=1.0, codec="int8") is None
    free = link_facts({"source": "a", "target": "b", **FREE}, FREE, active_s=9.0, step_s=1.0)
    assert (free.egress_usd, free.egress_usd_per_day, free.egress_usd_per_step) == (None,) * 3


def test_status_tells_it_by_link_and_in_a_line() -> None:
    run = a_run("ACTIVE", codec="int8")
    assert "egress" not in rendered(LiveTable(run))
    run.links[0].egress_usd_per_byte = 1e-6
    run.totals["step_s"] = 0.5
    text = rendered(LiveTable(run))
    day = 1.0 / run.active_s * DAY_S
    assert f"egress $1.00, $0.04 a step, ${day:.2f} a day; int8 instead of fp32 saves" in text
    assert re.search(r"sent +egress +a day +a step", text)
    row = next(line for line in text.splitlines() if line.startswith("a → b"))
    assert "$1.00" in row
    assert f"${day:.2f}" in row


def test_the_summary_keeps_it() -> None:
    record = RunRecord("r1", ("a", "b"))
    record.view.about = {
        "codec": "int8",
        "links": [
            {"source": "a", "target": "b", "bytes_per_s": 1.0, "rtt_s": 1.0, PRICE: USD_PER_BYTE}
        ],
    }
    values = {"sent_bytes": 1e12, "raw_bytes": 4e12, "busy_s": 1.0}
    record.measured.add("a", "link", 0, values, {"source": "a", "target": "b"})
    summary = summarise(record, active_s=3600.0, verified_steps=0)
    text = rendered(RunSummary(summary))
    assert "$20.00, $480.00 a day" in text
    assert "int8 instead of fp32 saves $1440.00 a day" in text
