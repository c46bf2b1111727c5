"""Takes the pictures of dashboard and report that docs/ shows: `python -m tests.tools.pictures`.

Each picture carries a digest of the words that it shows, without their figures, so that a test
finds a picture that has aged without taking it anew.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import sys
import tempfile
import time
from pathlib import Path

from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.dashboard.run_page import Asked, RunShown, run_parts
from isthmus.orchestrator.dashboard.run_places import RunPlace
from isthmus.orchestrator.dashboard.watched_run import WatchedRun
from isthmus.orchestrator.evidence.record.run_record import read_record
from isthmus.orchestrator.evidence.report.page import page
from isthmus.orchestrator.evidence.report.run_facts import RunFacts, run_facts
from isthmus.orchestrator.evidence.report.run_page import opening
from tests.fakes.dashboards import GrowingRun, growing_run, serving
from tests.fakes.recorded_runs import SITES, record_run

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
DIGEST = "words"
WIDTH_PX, HEIGHT_PX = 1100, 720
COLOURS = 64
"""Of each picture: they keep it small."""


def lose_a_site(run: GrowingRun) -> None:
    """Have the run of the dashboard's picture lose a site."""
    run.take_steps(90)
    run.lose("virginia")
    run.take_steps(39)


def dashboard_words(home: Path) -> str:
    """Return what the dashboard says at first of a run that has lost a site."""
    with growing_run(home) as run:
        lose_a_site(run)
        place = RunPlace("g1", run.folder.path, is_own=True, elsewhere="", submitted_wall_s=0.0)
        watched = WatchedRun(place)
        watched.open(run.folder.path, SITES, None)
        while watched.read() or not watched.figures()["is_complete"]:
            pass
        return run_parts(RunShown.of(watched, Asked()), Asked())["head"]


def recorded_facts(home: Path) -> RunFacts:
    """Return the figures of the run of the report's picture."""
    recorded = RecordedRun(record_run(home, steps=90))
    return run_facts(read_record(recorded.run(), recorded.events(0)))


def report_words(home: Path) -> str:
    """Return what its report says at first."""
    return opening(recorded_facts(home))


def digest(text: str) -> str:
    """Return a digest of a page's words, without figures."""
    words = html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", text, flags=re.DOTALL))
    return hashlib.sha256(re.sub(r"[\W\d_]+", " ", words).encode()).hexdigest()[:16]


def main() -> int:
    """Take both pictures."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    from tests.fakes.dashboard_pages import says, started_browser

    with tempfile.TemporaryDirectory() as place, started_browser() as browser:
        home = Path(place)
        words = {
            "dashboard": digest(dashboard_words(home / "a")),
            "report": digest(report_words(home / "b")),
        }
        view = browser.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX})
        text = page([recorded_facts(home / "c")], [], "0.1.0")
        (home / "report.html").write_text(text, encoding="utf-8")
        view.goto((home / "report.html").as_uri())
        shots = {"report": view.screenshot()}
        with growing_run(home / "d", began_s=time.time() - 130) as run, serving(home / "d") as at:
            lose_a_site(run)
            view.goto(f"{at.url}/runs/g1")
            says(view, "live")
            view.wait_for_function("() => document.querySelector('.bar .age').textContent")
            shots["dashboard"] = view.screenshot()
    for name, shot in shots.items():
        about = PngInfo()
        about.add_text(DIGEST, words[name])
        small = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS)
        small.save(FOLDER / f"{name}.png", optimize=True, pnginfo=about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
