"""Keeps a run at Weights & Biases, or in a folder that is synchronised later."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import Wandb

if TYPE_CHECKING:
    from wandb import Run


class WandbRun:
    """Logs a run's figures of each step; events are lines of a table.

    The key is WANDB_API_KEY, or what `wandb login` has left.
    """

    def __init__(
        self, settings: Wandb, run_id: str, job: str, folder: Path, facts: dict[str, Any]
    ) -> None:
        """Log nothing yet.

        Args:
            settings: Where.
            run_id: The run.
            job: Its job's name.
            folder: Its own; files are there unless WANDB_DIR says otherwise.
            facts: What it is.
        """
        self._settings, self._id, self._job, self._facts = settings, run_id, job, facts
        self._folder = folder
        self._run: Run | None = None
        self._state = ""

    def open(self) -> str:
        """Begin the run there, or go on with it."""
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        run = self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            mode=self._settings.mode,  # type: ignore[arg-type, unused-ignore]
            id=self._id,
            name=self._id,
            group=self._job,
            config=self._facts,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(self._folder)),
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        run.define_metric("trained_step")
        run.define_metric("*", step_metric="trained_step")
        return f"{run.url or run.dir}"

    def send(self, update: Update) -> bool:
        """Log what is new: by the step of the training, for sites may be a step apart."""
        assert self._run is not None
        for point in update.points:
            self._run.log({"trained_step": point.step, **point.values})
        for told in update.events:
            self._run.summary[f"event/{told.sequence:06}"] = f"step {told.step}: {told.text}"
        self._state = update.state
        return True

    def close(self) -> None:
        """Send what is left; a run that failed here has failed there."""
        import wandb

        assert self._run is not None
        exit_code = 1 if self._state == "FAILED" else 0
        self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)  # returns once the library's own process has written all
