"""What the launcher tells a rank through its environment: docs/architecture.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topology.documents.run_documents import DocumentText, load_run
from topology.errors import ConfigError
from topology.job import Job
from topology.world import Accelerator, Detection, Endpoint, Site, Topology

_NAMES = (
    "ISTHMUS_RUN",
    "ISTHMUS_GENERATION",
    "ISTHMUS_SITE",
    "ISTHMUS_GATEWAY",
    "ISTHMUS_JOB",
    "ISTHMUS_TOPOLOGY",
    "ISTHMUS_OVERRIDES",
    "ISTHMUS_RUN_FOLDER",
)


class NotLaunchedError(RuntimeError):
    """The script was not started by isthmus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A rank's place in a run."""

    run: str
    generation: int
    site: str
    gateway: Path
    """The socket of the node's gateway."""
    job: Job
    topology: Topology
    run_folder: Path

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        """Read the variables, and both documents.

        Raises:
            NotLaunchedError: none of the variables is there.
            ConfigError: some are missing or wrong, or a document is.
        """
        missing = [name for name in _NAMES if name not in environ]
        if len(missing) == len(_NAMES):
            raise NotLaunchedError(
                "sites.join: this process was not started by isthmus (no ISTHMUS_GATEWAY). Start "
                "the script with `isthmus launch`, or call sites.join(alone=True) to train one "
                "site by itself."
            )
        if missing:
            raise ConfigError(f"environment: {', '.join(missing)} not set; is the launcher older?")
        overrides = read_overrides(environ["ISTHMUS_OVERRIDES"])
        job, topology = Path(environ["ISTHMUS_JOB"]), Path(environ["ISTHMUS_TOPOLOGY"])
        run = load_run(
            DocumentText(_text(job), job.name, overrides["job"]),
            DocumentText(_text(topology), topology.name, overrides["topology"]),
        )
        return cls(
            run=environ["ISTHMUS_RUN"],
            generation=_number("ISTHMUS_GENERATION", environ["ISTHMUS_GENERATION"]),
            site=environ["ISTHMUS_SITE"],
            gateway=Path(environ["ISTHMUS_GATEWAY"]),
            job=run.job,
            topology=run.topology,
            run_folder=Path(environ["ISTHMUS_RUN_FOLDER"]),
        )


def lone_topology(num_ranks: int) -> Topology:
    """Return a world of one site without links, for a script that runs by itself."""
    unknown = Accelerator(name="unknown", peak_flops_per_s={}, memory_bytes=0, mfu=0.0)
    site = Site(
        name="alone",
        index=0,
        nodes=1,
        accelerators_per_node=num_ranks,
        accelerator=unknown,
        address="127.0.0.1",
    )
    return Topology(
        name="alone",
        sites=(site,),
        links=(),
        failure=Detection(detect_within_s=15.0, min_sites=1, start_within_s=600.0),
        coordinator=Endpoint(host="127.0.0.1", port=0),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment: {name}: want a whole number, got {text!r}") from error


def read_overrides(text: str) -> dict[str, list[str]]:
    """Parse {"job": ["path=value", ...], "topology": [...]}."""
    wrong = "environment: ISTHMUS_OVERRIDES: want a JSON object of lists of path=value"
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(wrong) from error
    if not isinstance(fields, dict):
        raise ConfigError(wrong)
    overrides = {name: fields.get(name, []) for name in ("job", "topology")}
    if not all(isinstance(each, list) for each in overrides.values()):
        raise ConfigError(wrong)
    return {name: [str(override) for override in each] for name, each in overrides.items()}
