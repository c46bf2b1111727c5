"""isthmus topology: show, presets, accelerators; and the presets that init writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.topology.presets.templates import PRESETS, job_yaml, topology_yaml
from tests.cli.conftest import Isthmus


def test_the_catalogue_and_the_presets_are_listed(isthmus: Isthmus) -> None:
    listed = isthmus("topology", "accelerators", "--json").envelope["data"]["accelerators"]
    assert "h100-sxm" in {each["name"] for each in listed}
    assert all(each["source"] for each in listed)
    assert "mi300x" in isthmus("topology", "accelerators").out
    presets = isthmus("topology", "presets", "--json").envelope["data"]["presets"]
    assert [each["name"] for each in presets] == list(PRESETS)
    assert "three-continents" in isthmus("topology", "presets").out


@pytest.mark.parametrize("preset", PRESETS)
def test_init_writes_each_preset(isthmus: Isthmus, tmp_path: Path, preset: str) -> None:
    """That each is valid, tests/topology/test_templates.py shows."""
    assert isthmus("init", tmp_path, "--preset", preset).code == 0
    for name, text in (("job", job_yaml), ("topology", topology_yaml)):
        written = (tmp_path / f"{name}.yaml").read_text().splitlines()
        assert written[1:] == text(preset).splitlines()[1:]  # before that, where the schema is


def test_what_init_writes_is_valid(isthmus: Isthmus, tmp_path: Path) -> None:
    assert isthmus("init", tmp_path).code == 0
    assert isthmus("validate", tmp_path / "job.yaml", tmp_path / "topology.yaml").code == 0


def test_init_refuses_an_unknown_preset(isthmus: Isthmus, tmp_path: Path) -> None:
    done = isthmus("init", tmp_path, "--preset", "four-planets", "--json")
    assert (done.code, done.envelope["error"]["code"]) == (2, "USAGE")
    assert not list(tmp_path.glob("*.yaml"))


def test_validate_warns_where_a_measurement_is_far_from_the_description(
    isthmus: Isthmus, files: Path
) -> None:
    path = files / "topology.yaml"
    text = path.read_text()
    before = "bandwidth: 200Mbit/s, rtt: 62ms, jitter: 1ms"
    assert before in text
    assert isthmus("validate", path, files / "job.yaml").err == ""
    path.write_text(text.replace(before, f"{before}, measured: {{bandwidth: 100Mbit/s}}"))
    done = isthmus("validate", path, files / "job.yaml")
    assert done.code == 0
    assert done.err == (
        "warning: oregon to virginia: bandwidth 100Mbit/s was measured, 200Mbit/s is described "
        "(-50%): the measured figure is used\n"
    )
    entries = isthmus("validate", path, "--json").envelope["data"]["files"]
    assert len(entries[0]["warnings"]) == 1


def test_show_refuses_what_is_a_job_s(isthmus: Isthmus, files: Path) -> None:
    done = isthmus(
        "topology", "show", files / "topology.yaml", "--set", "trainer.steps=3", "--json"
    )
    assert (done.code, done.envelope["error"]["code"]) == (2, "USAGE")
    assert "trainer.steps" in done.envelope["error"]["message"]
