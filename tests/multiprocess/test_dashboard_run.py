"""A real run in a real browser, from its launch through a site's loss and return to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.dashboard_pages import (
    fits,
    needs_chromium,
    opened,
    says,
    serious_findings,
    shows,
    started_browser,
)
from tests.multiprocess.harness import Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, steps_of, victim

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, needs_chromium]

WAIT_MS = 150_000
STEP_FLOPS = ("50GFLOP/s", "1GFLOP/s")
"""The sites' accelerators become slower: a step takes some hundredths of a second of waiting."""


def test_a_page_follows_a_run_through_loss_and_return(run: Bench, tmp_path: Path) -> None:
    """The others go on, no step is lost, and the site takes part again beside them.

    How pages look at other widths and in the dark: tests/orchestrator/test_dashboard_browser.py.
    """
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=100_000, tree="star") + "  compute: modelled\n"
    job = run.write(topology.replace(*STEP_FLOPS), text)
    following = run.start("launch", str(job), "--dashboard", "--run-id", "r")
    assert following.stderr is not None
    url = following.stderr.readline().strip().removeprefix("dashboard: ")
    with (
        started_browser() as browser,
        opened(browser, url, tmp_path, bypass_csp=True, wait_ms=WAIT_MS) as page,
    ):
        run.wait_for("first steps", lambda: is_training(run, 5))
        shows(page, "head", "ACTIVE")
        says(page, "live")
        kill(victim(run, "gateway"))
        shows(page, "events", "the run continues without site c")
        assert not serious_findings(page)
        assert fits(page)
        shows(page, "events", "site c takes part again")
        page.wait_for_function("!document.querySelector('.map .site.out')")
        before = max(steps_of(run, "c"))
        run.wait_for("steps with it", lambda: max(steps_of(run, "c")) > before + 2)
        run.isthmus("cancel", "r").check()
        shows(page, "head", "CANCELLED")
        says(page, "ended")
        assert fits(page)
    following.communicate(timeout=60)
    for site in "ab":
        steps = steps_of(run, site)
        assert steps == [*range(1, len(steps) + 1)], site
    of_c = steps_of(run, "c")
    assert of_c == sorted({*of_c})
    assert len(of_c) < of_c[-1], "it was away"
    status = run.isthmus("status", "r", "--json").check().envelope["data"]
    # Hashes of all that took part were compared after every step, and equal.
    assert status["totals"]["verified_steps"] >= of_c[-1] - 20
