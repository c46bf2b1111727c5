"""Event files, read with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.orchestrator.exporters.figures import Point
from isthmus.orchestrator.exporters.tensorboard import EventFiles
from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import TensorBoard
from tests.fakes.exported_runs import (
    exported_run,
    is_near,
    needs_library,
    series_of,
    spec_with,
    update_of,
)


@pytest.fixture(autouse=True)
def _library() -> None:
    needs_library("tensorboard")


def scalars_of(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[str]]]:
    """Return all scalars of a folder's event files, and all texts."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, list[str]] = {}
    paths = sorted(folder.glob("events.out.tfevents.*"))
    for event in (each for path in paths for each in LegacyEventFileLoader(str(path)).Load()):
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts.setdefault(value.tag, []).append(value.tensor.string_val[0].decode())
            else:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars, texts


def test_every_figure_of_every_step_is_there(tmp_path: Path) -> None:
    update = update_of(exported_run(tmp_path), spec_with())
    files = EventFiles(TensorBoard(folder=str(tmp_path / "tb")), "r1", tmp_path)
    assert files.open() == f"tensorboard --logdir {tmp_path / 'tb' / 'r1'}"
    files.send(update)
    files.close()
    scalars, texts = scalars_of(tmp_path / "tb" / "r1")
    expected = series_of(update.points)
    assert len(expected["loss"]) == 40
    assert is_near(scalars, expected)
    assert texts == {"events/end": ["run r1 SUCCEEDED"]}


def test_tensorboard_itself_shows_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    files = EventFiles(TensorBoard(), "r1", tmp_path)
    files.open()
    files.send(update_of(exported_run(tmp_path), spec_with()))
    files.close()
    guidance = {"tensors": 0}  # all of them
    shown = EventAccumulator(str(tmp_path / "tensorboard"), guidance).Reload()
    assert [each.step for each in shown.Tensors("loss")] == list(range(1, 41))
    assert "loss" in shown.PluginTagToContent("scalars")
    assert "events/end" in shown.PluginTagToContent("text")


def test_the_next_coordinator_goes_on_in_a_file_of_its_own(tmp_path: Path) -> None:
    for step in (1, 2):
        files = EventFiles(TensorBoard(), "r1", tmp_path)
        files.open()
        files.send(Update(samples=(), points=(Point(step, 1e9 + step, {"loss": 2.0}),)))
        files.close()
    scalars, _ = scalars_of(tmp_path / "tensorboard")
    assert scalars["loss"] == [(1, 2.0), (2, 2.0)]
