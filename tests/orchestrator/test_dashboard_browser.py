"""The dashboard in a real browser: at two widths and in both themes, while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isthmus.orchestrator.run_folder.log_files import LogWriter
from isthmus.protos.control.v1 import control_pb2
from tests.cli.runs import a_run, announce
from tests.fakes.dashboard_pages import (
    SCHEMES,
    WIDTHS,
    Scheme,
    fits,
    needs_chromium,
    opened,
    pictured,
    says,
    serious_findings,
    shows,
    started_browser,
)
from tests.fakes.dashboards import Served, growing_run, serving
from tests.fakes.exported_runs import exported_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator
from tests.fakes.scripted_coordinator import serving as coordinating

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DARK_PAPER = "rgb(21, 24, 27)"
LIGHT_PAPER = "rgb(253, 253, 251)"
EVIL = "</title><script>window.ran = true</script><img src=x onerror='window.ran = true'>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.multiprocess,
    needs_chromium,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", list(WIDTHS))
def test_it_fits_and_follows_the_system(
    browser: Browser, tmp_path: Path, width: str, scheme: Scheme
) -> None:
    exported_run(tmp_path, steps=90)
    with serving(tmp_path) as served:
        for path, words in (("/", "live"), ("/runs/r1", "ended")):
            with opened(browser, served.url + path, tmp_path, width=width, scheme=scheme) as page:
                says(page, words)
                paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert paper == (DARK_PAPER if scheme == "dark" else LIGHT_PAPER)
                page.locator("summary").evaluate_all("all => all.forEach(each => each.click())")
                assert fits(page)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", list(WIDTHS))
def test_a_run_grows_loses_a_site_and_has_it_back(
    browser: Browser, tmp_path: Path, width: str, scheme: Scheme
) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(5)
        url = f"{served.url}/runs/g1"
        with opened(browser, url, tmp_path, width=width, scheme=scheme) as page:
            says(page, "live")
            shows(page, "head", "5in 5s")
            page.locator("#part-loss summary").click()
            run.lose("virginia")
            run.take_steps(4)
            shows(page, "head", "9in 9s")
            shows(page, "head", "Site virginia is lost")
            shows(page, "figures", "LOST")
            shows(page, "events", "the run continues without site virginia")
            assert page.locator(".map .site.out").count() == 1
            assert page.locator("#part-loss details[open]").count() == 1, "it stays unfolded"
            run.start_again("virginia")
            shows(page, "head", "Site virginia is starting again")
            run.let_in("virginia")
            run.take_steps(1)
            shows(page, "events", "site virginia takes part again")
            page.wait_for_function("!document.querySelector('.map .site.out')")
            assert page.locator("#part-pace .mark").count() == 4, "two events, on two charts each"
            run.event("run.ended", state="SUCCEEDED", reason_code="", reason="", failure=None)
            says(page, "ended")
            assert page.title().startswith("grows: SUCCEEDED")
            assert fits(page)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", list(WIDTHS))
def test_a_loss_is_seen_at_a_glance(
    browser: Browser, tmp_path: Path, width: str, scheme: Scheme
) -> None:
    """Without scrolling: which site, since when, why, and what happens next."""
    with growing_run(tmp_path, began_s=time.time() - 130.0) as run, serving(tmp_path) as served:
        run.take_steps(90)
        run.lose("virginia")
        run.take_steps(39)
        url = f"{served.url}/runs/g1"
        with opened(browser, url, tmp_path, width=width, scheme=scheme) as page:
            says(page, "live")
            shows(page, "head", "Site virginia is lost")
            page.wait_for_function("() => document.querySelector('.bar .age').textContent")
            for words in (
                "Site virginia is lost",
                time.strftime("%H:%M:%S", time.localtime(run.began_s + 90)),
                "its agent was silent for 15 s",
                "The other 2 sites keep training.",
                "It is started again as soon as its agent answers. Starting takes at most 2min",
                "WAN-bound",
            ):
                box = page.get_by_text(words).first.bounding_box()
                assert box is not None, words
                assert box["y"] + box["height"] <= WIDTHS[width][1], words
            assert page.title() == "\N{HEAVY MULTIPLICATION X} Site virginia is lost · grows"
            assert "b3261e" in (page.locator("link[rel=icon]").get_attribute("href") or "")
            run.let_in("virginia")
            run.take_steps(600)  # however slow this machine is, that is no stall
            page.wait_for_function("() => document.title === 'grows: ACTIVE · isthmus'")
            assert "1f7a4d" in (page.locator("link[rel=icon]").get_attribute("href") or "")


@pytest.mark.parametrize("width", list(WIDTHS))
def test_a_failed_run_shows_its_log_and_leads_to_its_report(
    browser: Browser, tmp_path: Path, width: str
) -> None:
    exported_run(tmp_path, state="FAILED", reason="rank 1 was killed")
    line = control_pb2.LogLine(site="montreal", source="rank1", text="CUDA <out> of memory")
    LogWriter(tmp_path / "runs" / "r1").append("montreal", [line])
    with serving(tmp_path) as served:
        with opened(browser, f"{served.url}/runs/r1", tmp_path, width=width) as page:
            says(page, "ended")
            shows(page, "log", "CUDA <out> of memory")
            page.get_by_role("link", name="report").click()
            page.get_by_text("isthmus report").wait_for()
            assert page.locator("#theme").is_visible(), "its script runs, its style holds"
            assert fits(page)
        assert served.get("/trace/r1").json["traceEvents"]


def test_events_are_filtered(browser: Browser, tmp_path: Path) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(2)
        with opened(browser, f"{served.url}/runs/g1", tmp_path) as page:
            says(page, "live")
            events = page.locator("#part-events")
            assert "joined" not in events.inner_text()
            page.get_by_role("link", name="All", exact=True).click()
            says(page, "live")
            assert "all ranks of site montreal are running" in events.inner_text()
            page.get_by_role("link", name="oregon", exact=True).click()
            says(page, "live")
            assert "montreal are" not in events.inner_text()
            page.get_by_role("link", name="Newest steps").click()
            page.wait_for_url("**window=newest&events=oregon")


def test_it_goes_on_when_the_dashboard_is_started_again(browser: Browser, tmp_path: Path) -> None:
    with growing_run(tmp_path) as run:
        run.take_steps(2)
        with serving(tmp_path) as served:
            first: Served = served
            entered = opened(browser, f"{served.url}/runs/g1", tmp_path, may_be_refused=True)
            page = entered.__enter__()
            says(page, "live")
        says(page, "No answer from the dashboard: trying again")
        run.take_steps(5)
        with serving(tmp_path, port=first.port):
            says(page, "live")
            shows(page, "head", "7in 7s")
            entered.__exit__(None, None, None)


def test_the_address_with_the_token_opens_it(browser: Browser, tmp_path: Path) -> None:
    exported_run(tmp_path)
    with (
        serving(tmp_path, token="of-this-test") as served,
        opened(browser, f"{served.url}/?token=of-this-test", tmp_path) as page,
    ):
        shows(page, "runs", "hello-wan")
        page.get_by_role("link", name="hello-wan").click()
        says(page, "ended")
        assert page.evaluate("document.cookie") == ""


def test_a_name_that_is_a_script_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    with growing_run(tmp_path, name=EVIL) as run, serving(tmp_path) as served:
        run.take_steps(2)
        for path in ("/", "/runs/g1"):
            with opened(browser, served.url + path, tmp_path) as page:
                says(page, "live")
                run.take_steps(1)  # so that its parts come by the script, too
                shows(page, "runs" if path == "/" else "head", "3" if path == "/" else "4")
                assert page.evaluate("window.ran") is None
                assert EVIL in page.locator("main").inner_text()


def test_a_run_is_stopped_only_when_that_is_confirmed(browser: Browser, tmp_path: Path) -> None:
    led = a_run("ACTIVE", "g1")
    with (
        growing_run(tmp_path) as run,
        coordinating(ScriptedCoordinator(runs=[led])) as address,
        serving(tmp_path, token="of-this-test", allows_actions=True) as served,
    ):
        run.take_steps(2)
        announce(run.folder, address)
        url = f"{served.url}/?token=of-this-test"
        with opened(browser, url, tmp_path, width="phone", bypass_csp=True) as page:
            page.goto(f"{page.url}runs/g1")
            says(page, "live")
            page.get_by_role("button", name="Stop…", exact=True).click()
            asked = page.get_by_role("dialog", name="Stop this run?")
            assert not serious_findings(page)
            asked.get_by_role("button", name="Leave it running").click()
            asked.wait_for(state="hidden")
            page.get_by_role("button", name="Stop…", exact=True).click()
            page.keyboard.press("Escape")
            asked.wait_for(state="hidden")
            assert led.state == control_pb2.RUN_STATE_ACTIVE
            page.get_by_role("button", name="Stop…", exact=True).click()
            asked.get_by_role("button", name="Stop", exact=True).click()
            shows(page, "actions", "Stopping")
            page.wait_for_function(
                "!document.getElementById('part-actions').textContent.includes('Stopping')"
            )
            assert led.state == control_pb2.RUN_STATE_STOPPING


def test_it_is_used_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    exported_run(tmp_path)
    with serving(tmp_path) as served, opened(browser, f"{served.url}/runs/r1", tmp_path) as page:
        says(page, "ended")
        reached: list[Any] = []
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.textContent.slice(0, 20)"))
        wanted = {"To the figures", "isthmus dashboard", "Dark", "Whole run", "Newest steps"}
        assert wanted <= set(reached)
        page.get_by_role("link", name="Newest steps").focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**window=newest")
        assert page.locator("#part-window [aria-current]").inner_text() == "Newest steps"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", list(WIDTHS))
def test_axe_finds_nothing_serious(
    browser: Browser, tmp_path: Path, width: str, scheme: Scheme
) -> None:
    exported_run(tmp_path)
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(5)
        run.event("site.lost", "virginia", message="silent for 15 s", note="virginia lost")
        run.take_steps(5, ("oregon", "montreal"))
        for path, words in (("/", "live"), ("/runs/r1", "ended"), ("/runs/g1", "live")):
            with opened(
                browser, served.url + path, tmp_path, width=width, scheme=scheme, bypass_csp=True
            ) as page:
                says(page, words)
                assert not serious_findings(page), path


def test_a_picture_is_kept_of_a_page_that_fails(browser: Browser, tmp_path: Path) -> None:
    exported_run(tmp_path)
    with serving(tmp_path) as served, opened(browser, served.url, tmp_path) as page:
        path = tmp_path / "failed.png"
        with pytest.raises(AssertionError) as failed, pictured(page, path):
            raise AssertionError
        assert path.read_bytes().startswith(b"\x89PNG")
        assert str(path) in failed.value.__notes__[0]
