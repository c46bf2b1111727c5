"""The page that a Prometheus server scrapes, read with the library's own parser."""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from isthmus.orchestrator.exporters.families import FAMILIES, Kind
from isthmus.orchestrator.exporters.prometheus import PrometheusPage
from isthmus.orchestrator.exporters.tool import Update
from isthmus.protos.private_files import UnsafeFileError
from isthmus.topology.spec.exporters import Prometheus
from tests.fakes.exported_runs import exported_run, figures_of, needs_library, spec_with

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(autouse=True)
def _library() -> None:
    needs_library("prometheus")


@pytest.fixture(autouse=True)
def _own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_TOKEN_FILE", str(tmp_path / "token"))


def scrape(shown: str, accept: str = "", *, token: str | None = None) -> str:
    """Read a page with the token that its file has, or another one; `shown`: as `open` says."""
    found = re.fullmatch(r"(http://\S+) \(bearer token: (\S+)\)", shown)
    assert found is not None, shown
    token = Path(found[2]).read_text() if token is None else token
    headers = {"Authorization": f"Bearer {token}", **({"Accept": accept} if accept else {})}
    request = urllib.request.Request(found[1], headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("accept", ["", OPEN_METRICS], ids=["text", "OpenMetrics"])
def test_a_scrape_has_every_sample_with_its_labels(tmp_path: Path, accept: str) -> None:
    from prometheus_client import parser
    from prometheus_client.openmetrics import parser as open_parser

    folder, spec = exported_run(tmp_path), spec_with()
    samples = figures_of(folder, spec)[0].samples()
    page = PrometheusPage(Prometheus(port=0), "r1")
    url = page.open()
    try:
        page.send(Update(samples=tuple(samples)))
        text = scrape(url, accept)
    finally:
        page.close()
    read = open_parser if accept else parser
    found = {}
    for family in read.text_string_to_metric_families(text):
        for each in family.samples:
            if not each.name.endswith("_created"):
                found[each.name, frozenset(each.labels.items())] = each.value
                assert family.documentation
    expected = {
        (
            each.family.prometheus,
            frozenset(
                {"run": "r1", **dict(zip(each.family.labels, each.labels, strict=True))}.items()
            ),
        ): each.value
        for each in samples
    }
    assert found == pytest.approx(expected, rel=1e-12)
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    for family in {each.family for each in samples}:
        name = family.prometheus.removesuffix("_total") if accept else family.prometheus
        assert types[name] == ("counter" if family.kind is Kind.COUNTER else "gauge")
    assert len(expected) > 60
    assert len({each.family for each in samples}) > len(FAMILIES) - 6


def test_who_has_not_the_token_gets_nothing(tmp_path: Path) -> None:
    page = PrometheusPage(Prometheus(port=0), "r1")
    shown = page.open()
    try:
        url, path = shown.split()[0], tmp_path / "prometheus.token"
        assert path.stat().st_mode & 0o077 == 0
        for token in ("", "wrong", path.read_text()[:-1], "caf\xe9"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                scrape(shown, token=token)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=10)
        first = path.read_text()
    finally:
        page.close()
    again = PrometheusPage(Prometheus(port=0), "r2")
    try:
        scrape(again.open())
        assert path.read_text() == first, "a Prometheus server keeps its configuration"
    finally:
        again.close()


def test_it_is_open_where_that_is_asked_for() -> None:
    page = PrometheusPage(Prometheus(port=0, is_open=True), "r1")
    try:
        url, _, words = page.open().partition(" ")
        assert words == "(open: no token)"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
    finally:
        page.close()


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.token"
    path.write_text("x" * 32)
    path.chmod(0o644)
    with pytest.raises(UnsafeFileError, match="others may read"):
        PrometheusPage(Prometheus(port=0), "r1").open()


def test_what_is_not_a_number_is_shown_as_such() -> None:
    from isthmus.orchestrator.exporters import families
    from isthmus.orchestrator.exporters.figures import Sample

    page = PrometheusPage(Prometheus(port=0), "r1")
    url = page.open()
    try:
        page.send(Update(samples=(Sample(families.LOSS, (), math.nan),)))
        assert 'isthmus_loss{run="r1"} NaN' in scrape(url)
    finally:
        page.close()


def test_a_port_that_is_taken_is_named() -> None:
    first = PrometheusPage(Prometheus(port=0), "r1")
    port = int(first.open().split("/")[2].rpartition(":")[2])
    try:
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: .*in use"):
            PrometheusPage(Prometheus(port=port), "r2").open()
    finally:
        first.close()
