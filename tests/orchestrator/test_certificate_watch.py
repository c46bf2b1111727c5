"""What is said of certificates that end, and what people see of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from isthmus.orchestrator.core import certificate_watch
from isthmus.orchestrator.core.certificate_watch import Certificate
from isthmus.orchestrator.core.run_events import CertificateSeen
from isthmus.protos.control.v1 import control_pb2 as pb
from tests.fakes.coordinators import FakeAgent, active, coordinating
from tests.fakes.worlds import topology_text

DAY_S = 86_400.0
NOW_S = 1_790_000_000.0


def seen(left_s: float, now_s: float = NOW_S) -> CertificateSeen:
    return CertificateSeen("a", "a.gateway", now_s + left_s, left_s)


def test_each_stage_is_told_once() -> None:
    """Looked at each hour, for a month in which it is renewed late."""
    known: Certificate | None = None
    told: list[tuple[str, str]] = []
    ends_s = NOW_S + 20 * DAY_S
    for hour in range(30 * 24):
        now_s = NOW_S + hour * 3600.0
        if hour == 22 * 24:
            ends_s = now_s + 90 * DAY_S
        jitter_s = hour % 3
        says = CertificateSeen("a", "a.gateway", ends_s + jitter_s, ends_s - now_s)
        for event in certificate_watch.look(known, says):
            stage = event.kind.removeprefix(certificate_watch.KIND)
            told.append((stage, str(event.detail.get("note", ""))))
            known = Certificate(float(str(event.detail["ends_wall_s"])), stage)
            assert event.site == "a"
    assert [stage for stage, _ in told] == ["valid", "ending", "last_day", "expired", "valid"]
    notes = [note for _, note in told]
    assert notes[0] == ""
    assert "a.gateway ends in 14 days: `isthmus certs renew a.gateway`" in notes[1]
    assert "ends in 23.0 h" in notes[2]
    assert "has expired" in notes[3]
    assert "was renewed: it ends in 90 days" in notes[4]


def test_a_renewal_in_good_time_is_written_down_and_told_to_nobody() -> None:
    known = Certificate(NOW_S + 20 * DAY_S, "valid")
    (event,) = certificate_watch.look(known, seen(90 * DAY_S))
    assert "note" not in event.detail


@pytest.mark.slow
async def test_status_has_what_agents_say_and_no_more(tmp_path: Path) -> None:
    async def says(agent: FakeAgent, **left_s: float) -> None:
        named = {name.replace("_", "."): value for name, value in left_s.items()}
        await agent.say(heartbeat=pb.Heartbeat(sequence=1, certificates_left_s=named))

    async with coordinating(tmp_path, topology_text(2)) as bench:
        a, b = await active(bench, "a", "b")
        odd = {"b_agent": 5.0, "coordinator": 5.0, "a_x": 5.0}
        await says(a, a_agent=80 * DAY_S, a_gateway=-5.0, **odd)
        await says(b, b_gateway=float("nan"))
        run = await bench.until(lambda run: len(run.certificates) == 2)
        assert run.certificates["a.agent"] == pytest.approx(time.time() + 80 * DAY_S, abs=60)
        assert "the certificate a.gateway has expired" in run.notes[-1]
        await says(a, a_gateway=90 * DAY_S)
        run = await bench.until(lambda run: "was renewed" in run.notes[-1])
        assert run.certificates["a.gateway"] == pytest.approx(time.time() + 90 * DAY_S, abs=60)
        for agent in (a, b):
            await agent.end(succeeded=True)
        ended = await bench.ended()
        assert set(ended.certificates) == {"a.agent", "a.gateway"}
