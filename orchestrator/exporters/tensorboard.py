"""Writes TensorBoard's event files, without TensorFlow or torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import TensorBoard

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class EventFiles:
    """Writes a run's figures of each step, and its events as texts.

    A run that goes on under another coordinator has another file in the same folder, as TensorBoard
    expects it.
    """

    def __init__(self, settings: TensorBoard, run_id: str, folder: Path) -> None:
        """Write nothing yet; `folder` is the run's own."""
        place = settings.folder
        self._folder = folder / "tensorboard" if place is None else Path(place) / run_id
        self._writer: EventFileWriter | None = None

    def open(self) -> str:
        """Begin a file.

        Raises:
            OSError: the disk refuses.
        """
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        return f"tensorboard --logdir {self._folder}"

    def send(self, update: Update) -> bool:
        """Write what is new, and have it on the disk."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        assert self._writer is not None
        for point in update.points:
            values = [
                Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()
            ]
            summary = Summary(value=values)
            self._writer.add_event(Event(wall_time=point.wall_s, step=point.step, summary=summary))
        for told in update.events:
            summary = text_pb(f"events/{told.event}", told.text)
            self._writer.add_event(Event(wall_time=told.wall_s, step=told.step, summary=summary))
        self._writer.flush()
        return True

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
