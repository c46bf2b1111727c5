"""A real run in real browsers, from its launch through a site's loss and return to its end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.fakes.dashboard_pages import (
    SCHEMES,
    WIDTHS,
    fits,
    needs_chromium,
    opened,
    says,
    serious_findings,
    shows,
    started_browser,
)
from tests.multiprocess.harness import Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, victim

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
    needs_chromium,
]

WAIT_MS = 150_000


def test_pages_follow_a_run_through_loss_and_return(run: Bench, tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    )
    job = run.write(topology, job_yaml(steps=100_000))
    following = run.start("launch", str(job), "--dashboard", "--run-id", "r")
    assert following.stderr is not None
    url = following.stderr.readline().strip().removeprefix("dashboard: ")
    with started_browser() as browser, contextlib.ExitStack() as held:
        pages = [
            held.enter_context(
                opened(
                    browser,
                    url,
                    tmp_path,
                    width=width,
                    scheme=scheme,
                    bypass_csp=True,
                    wait_ms=WAIT_MS,
                )
            )
            for width in WIDTHS
            for scheme in SCHEMES
        ]
        run.wait_for("first steps", lambda: is_training(run, 5))
        for page in pages:
            shows(page, "head", "ACTIVE")
            says(page, "live")
        kill(victim(run, "gateway"))
        for page in pages:
            shows(page, "events", "the run continues without site c")
            assert not serious_findings(page)
            assert fits(page)
        for page in pages:
            shows(page, "events", "site c takes part again")
            page.wait_for_function("!document.querySelector('.map .site.out')")
        run.isthmus("cancel", "r").check()
        for page in pages:
            shows(page, "head", "CANCELLED")
            says(page, "ended")
            assert fits(page)
    following.communicate(timeout=60)
