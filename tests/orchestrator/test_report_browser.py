"""The page in a real browser: at two widths and in both themes, clicked through, and quiet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.evidence.record.bench_record import BENCH, read_bench
from isthmus.orchestrator.evidence.record.run_record import read_record
from isthmus.orchestrator.evidence.report.page import page
from isthmus.orchestrator.evidence.report.run_facts import RunFacts, run_facts
from tests.fakes.dashboard_pages import started_browser
from tests.fakes.recorded_benches import record_bench
from tests.fakes.recorded_runs import record_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WAIT_MS = 20_000
WIDTHS = {"desktop": (1200, 900), "phone": (360, 740)}
LONG = "a-site-whose-name-goes-on-and-on-and-on-without-a-place-to-break-it"
DARK_PAPER = "rgb(21, 24, 27)"
LIGHT_PAPER = "rgb(253, 253, 251)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.multiprocess,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: a run that failed, one of many buckets, and a sweep."""
    home = tmp_path_factory.mktemp("home")
    faults = ({"what": "cut", "source": "oregon", "target": "virginia"},)
    runs: list[RunFacts] = []
    for folder in (
        record_run(home, "r1", faults=faults, state="FAILED", reason="killed"),
        record_run(home, "r2", sites=(LONG, "<b>b", "c"), name=LONG, buckets=30, seed=3),
    ):
        recorded = RecordedRun(folder)
        runs.append(run_facts(read_record(recorded.run(), recorded.events(0))))
    path = home / "report.html"
    bench = read_bench(record_bench(home) / BENCH)
    path.write_text(page(runs, [bench], "0.0"), encoding="utf-8")
    return path


@contextmanager
def opened(
    browser: Browser,
    report: Path,
    *,
    width: str = "desktop",
    scheme: Literal["light", "dark"] = "light",
    scripts: bool = True,
) -> Iterator[Page]:
    """Open the page; hold at the end that it asked for nothing and complained of nothing."""
    wide, high = WIDTHS[width]
    context = browser.new_context(
        viewport={"width": wide, "height": high},
        color_scheme=scheme,
        java_script_enabled=scripts,
        offline=True,
    )
    context.set_default_timeout(WAIT_MS)
    asked: list[str] = []
    said: list[str] = []
    try:
        opened_page = context.new_page()
        opened_page.on("request", lambda request: asked.append(request.url))
        opened_page.on("console", lambda message: said.append(message.text))
        opened_page.on("pageerror", lambda error: said.append(str(error)))
        opened_page.goto(report.as_uri())
        yield opened_page
        assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
        assert not said
    finally:
        context.close()


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_it_fits_and_follows_the_system(
    browser: Browser, report: Path, width: str, scheme: Literal["light", "dark"]
) -> None:
    with opened(browser, report, width=width, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
        assert background(page) == (DARK_PAPER if scheme == "dark" else LIGHT_PAPER)
        page.locator("summary").evaluate_all("all => all.forEach(each => each.click())")
        assert page.locator("details[open]").count() == page.locator("details").count() > 5
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
        spills = page.evaluate(
            """() => [...document.querySelectorAll('svg.chart text')]
                .filter(text => getComputedStyle(text).display !== 'none')
                .map(text => [text.textContent, text.getBoundingClientRect()])
                .filter(([, box]) => box.width > 0 && (box.left < 0 || box.right > innerWidth + 1))
                .map(([words]) => words)"""
        )
        assert not spills


def test_the_step_selector(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        chooser = page.locator("[data-steps]").first
        steps = chooser.locator("select")
        before, after = chooser.locator("button").all()

        def shown() -> list[str | None]:
            panels = chooser.locator("[data-step]:visible").all()
            return [panel.get_attribute("data-step") for panel in panels]

        assert len(shown()) == 1
        steps.select_option(index=0)
        assert shown() == ["1"]
        assert before.is_disabled()
        after.click()
        assert shown() == ["2"]
        after.focus()
        page.keyboard.press("Enter")
        assert shown() == ["3"]
        before.click()
        assert shown() == ["2"]
        steps.select_option(index=6)
        assert shown() == ["40"]
        assert after.is_disabled()
        other = page.locator("[data-steps]").nth(1)
        assert other.locator("[data-step]:visible").count() == 1


def test_the_theme_is_chosen_and_remembered(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        toggle = page.locator("#theme")
        assert toggle.inner_text() == "Dark"
        toggle.click()
        assert background(page) == DARK_PAPER
        assert toggle.inner_text() == "Light"
        page.keyboard.press("Enter")  # it has the focus
        assert background(page) == LIGHT_PAPER


def test_every_control_is_reached_by_keyboard(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName"))
        assert {"A", "BUTTON", "SELECT", "SUMMARY", "DIV"} <= reached


def test_drawings_have_names(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        drawings = page.get_by_role("img").all()
        assert len(drawings) > 8
        assert all(drawing.get_attribute("aria-label") for drawing in drawings)


def test_without_scripts_all_steps_are_shown(browser: Browser, report: Path) -> None:
    with opened(browser, report, scripts=False) as page:
        assert page.locator("#theme:visible").count() == 0
        assert page.locator("[data-step]:visible").count() == 14


def test_it_prints_light(browser: Browser, report: Path) -> None:
    with opened(browser, report, scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert background(page) == LIGHT_PAPER
        assert page.locator("button:visible").count() == 0
