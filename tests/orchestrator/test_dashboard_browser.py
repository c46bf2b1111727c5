"""The dashboard in a real browser: at two widths and in both themes, while a run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.fakes.dashboards import Served, growing_run, serving
from tests.fakes.exported_runs import exported_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WAIT_MS = 20_000
WIDTHS = {"desktop": (1400, 900), "phone": (390, 800)}
DARK_PAPER = "rgb(21, 24, 27)"
LIGHT_PAPER = "rgb(253, 253, 251)"
EVIL = "</title><script>window.ran = true</script><img src=x onerror='window.ran = true'>"
Scheme = Literal["light", "dark"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.multiprocess,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with sync_api.sync_playwright() as driver:
        started: Browser = driver.chromium.launch(executable_path=CHROMIUM, timeout=WAIT_MS)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(
    browser: Browser,
    url: str,
    *,
    width: str = "desktop",
    scheme: Scheme = "light",
    bypass_csp: bool = False,
    may_be_refused: bool = False,
) -> Iterator[Page]:
    """Open a page; hold at the end that it asked nobody else, and complained of nothing."""
    wide, high = WIDTHS[width]
    context = browser.new_context(
        viewport={"width": wide, "height": high}, color_scheme=scheme, bypass_csp=bypass_csp
    )
    context.set_default_timeout(WAIT_MS)
    asked: list[str] = []
    said: list[str] = []
    try:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        yield page
        origin = "/".join(url.split("/")[:3])
        assert not [each for each in asked if not each.startswith((origin, "data:"))]
        if may_be_refused:
            said = [each for each in said if "ERR_CONNECTION_REFUSED" not in each]
        assert not said
    finally:
        context.close()


def says(page: Page, words: str) -> None:
    page.wait_for_function(
        "words => document.getElementById('connection').textContent === words", arg=words
    )


def shows(page: Page, part: str, words: str) -> None:
    page.wait_for_function(
        "([part, words]) => document.getElementById(`part-${part}`).textContent.includes(words)",
        arg=[part, words],
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_it_fits_and_follows_the_system(
    browser: Browser, tmp_path: Path, width: str, scheme: Scheme
) -> None:
    exported_run(tmp_path, steps=90)
    with serving(tmp_path) as served:
        for path, words in (("/", "live"), ("/runs/r1", "ended")):
            with opened(browser, served.url + path, width=width, scheme=scheme) as page:
                says(page, words)
                paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert paper == (DARK_PAPER if scheme == "dark" else LIGHT_PAPER)
                page.locator("summary").evaluate_all("all => all.forEach(each => each.click())")
                assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]


def test_a_run_grows_loses_a_site_and_has_it_back(browser: Browser, tmp_path: Path) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(5)
        with opened(browser, f"{served.url}/runs/g1") as page:
            says(page, "live")
            shows(page, "head", "5in 5s")
            page.locator("#part-loss summary").click()
            run.event("site.lost", "virginia", message="silent for 15 s", note="virginia lost")
            run.take_steps(4, ("oregon", "montreal"))
            shows(page, "head", "9in 9s")
            shows(page, "sites", "LOST")
            shows(page, "marks", "virginia lost")
            assert page.locator(".map .site.out").count() == 1
            assert page.locator("#part-loss details[open]").count() == 1, "it stays unfolded"
            run.event("site.returning", "virginia")
            run.event("site.returned", "virginia")
            run.take_steps(1)
            shows(page, "marks", "virginia returned")
            shows(page, "events", "site.returned")
            page.wait_for_function("!document.querySelector('.map .site.out')")
            run.event("run.ended", state="SUCCEEDED", reason_code="", reason="", failure=None)
            says(page, "ended")
            assert page.title().startswith("grows: SUCCEEDED")


def test_it_goes_on_when_the_dashboard_is_started_again(browser: Browser, tmp_path: Path) -> None:
    with growing_run(tmp_path) as run:
        run.take_steps(2)
        with serving(tmp_path) as served:
            first: Served = served
            entered = opened(browser, f"{served.url}/runs/g1", may_be_refused=True)
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
        opened(browser, f"{served.url}/?token=of-this-test") as page,
    ):
        page.wait_for_url(f"{served.url}/")
        shows(page, "runs", "hello-wan")
        page.get_by_role("link", name="hello-wan").click()
        says(page, "ended")
        assert page.evaluate("document.cookie") == ""


def test_a_name_that_is_a_script_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    with growing_run(tmp_path, name=EVIL) as run, serving(tmp_path) as served:
        run.take_steps(2)
        for path in ("/", "/runs/g1"):
            with opened(browser, served.url + path) as page:
                says(page, "live")
                run.take_steps(1)  # so that its parts come by the script, too
                shows(page, "runs" if path == "/" else "head", "3" if path == "/" else "4")
                assert page.evaluate("window.ran") is None
                assert EVIL in page.locator("main").inner_text()


def test_it_is_used_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    exported_run(tmp_path)
    with serving(tmp_path) as served, opened(browser, f"{served.url}/runs/r1") as page:
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
        assert page.locator("[aria-current]").inner_text() == "Newest steps"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_axe_finds_nothing_serious(
    browser: Browser, tmp_path: Path, width: str, scheme: Scheme
) -> None:
    pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    exported_run(tmp_path)
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(5)
        run.event("site.lost", "virginia", message="silent for 15 s", note="virginia lost")
        run.take_steps(5, ("oregon", "montreal"))
        for path, words in (("/", "live"), ("/runs/r1", "ended"), ("/runs/g1", "live")):
            with opened(
                browser, served.url + path, width=width, scheme=scheme, bypass_csp=True
            ) as page:
                says(page, words)
                page.evaluate(axe)
                found = page.evaluate("axe.run()")["violations"]
                serious = [
                    (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
                    for each in found
                    if each["impact"] in {"serious", "critical"}
                ]
                assert not serious, path
