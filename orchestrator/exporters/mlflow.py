"""Keeps a run at an MLflow server, or in a folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import Mlflow

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "isthmus.run"
"""Tells the run from all others, also to the next coordinator's exporters."""
BATCH = 1000
"""Figures that the server takes at once."""
STATUSES = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}
"""MLflow's words for the states in which a run ends."""


class MlflowRun:
    """Logs a run's figures of each step; events are tags.

    Tokens and passwords it takes from its library's own MLFLOW_TRACKING_ variables.
    """

    def __init__(
        self, settings: Mlflow, run_id: str, job: str, folder: Path, facts: dict[str, Any]
    ) -> None:
        """Log nothing yet.

        Args:
            settings: Where.
            run_id: The run.
            job: Its job's name.
            folder: Its own.
            facts: What it is: parameters.
        """
        given = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._uri = given or str(folder / "mlruns")
        self._experiment = settings.experiment or job
        self._run, self._facts = run_id, facts
        self._client: MlflowClient | None = None
        self._id = ""
        self._state = ""

    def open(self) -> str:
        """Find the run there, or begin it."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        # MLflow 3 keeps runs in folders only where it is asked to; it is, by this uri.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # of attempts; the last one raises
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        known = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{self._run}'")
        if known:
            self._id = known[0].info.run_id
        else:
            begun = client.create_run(experiment_id, tags={RUN_TAG: self._run}, run_name=self._run)
            self._id = begun.info.run_id
            params = [Param(name, str(value)) for name, value in self._facts.items()]
            client.log_batch(self._id, params=params)
        self._client = client
        return f"run {self._id} of experiment {self._experiment} at {self._uri}"

    def send(self, update: Update) -> bool:
        """Log what is new."""
        from mlflow.entities import Metric, RunTag

        assert self._client is not None
        metrics = [
            Metric(name, value, int(point.wall_s * 1000), point.step)
            for point in update.points
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + BATCH])
        tags = [
            RunTag(f"isthmus.event.{told.sequence:06}", f"step {told.step}: {told.text}"[:5000])
            for told in update.events
        ]
        if tags:
            self._client.log_batch(self._id, tags=tags)
        self._state = update.state
        return bool(metrics or tags)

    def close(self) -> None:
        """End the run there, if it has ended here."""
        assert self._client is not None
        if self._state in STATUSES:
            self._client.set_terminated(self._id, STATUSES[self._state])
