"""A run's documents at this site.

Checked, compared, kept in files, and what they ask to be started.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from protos.control.v1.control_pb2 import Document, Prepare
from protos.failure import one_line
from sites.agent.site_failures import SiteError
from topology.documents.run_documents import DocumentText, load_run
from topology.errors import ConfigError
from topology.hashing import config_hash
from topology.job import Job
from topology.timeouts import Timeouts
from topology.world import Site, Topology

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""It becomes part of paths."""
TRAINER = "sites.trainer"
"""The module that runs when the job names no script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """What one run is, at one site."""

    run_id: str
    generation: int
    config_hash: str
    job: Job
    topology: Topology
    site: Site
    timeouts: Timeouts
    folder: Path
    """The run's, at this site."""
    command: tuple[str, ...]
    """What a rank runs: script and arguments, or -m, module and arguments."""
    overrides: str
    """JSON: {"job": [...], "topology": [...]}."""

    @property
    def name(self) -> str:
        """Names the rendezvous: a process of an earlier generation cannot join it."""
        return f"{self.run_id}-{self.generation}"

    def node_folder(self, node: int) -> Path:
        """Return the folder of one node's logs."""
        return self.folder / f"node{node}"

    def environment(self, socket_path: Path) -> dict[str, str]:
        """Return what a rank finds in its environment: docs/architecture.md."""
        return {
            "ISTHMUS_RUN": self.run_id,
            "ISTHMUS_GENERATION": str(self.generation),
            "ISTHMUS_SITE": self.site.name,
            "ISTHMUS_GATEWAY": str(socket_path),
            "ISTHMUS_JOB": str(self.folder / "job.yaml"),
            "ISTHMUS_TOPOLOGY": str(self.folder / "topology.yaml"),
            "ISTHMUS_OVERRIDES": self.overrides,
            "ISTHMUS_RUN_FOLDER": str(self.folder),
        }


def read_documents(prepare: Prepare, site: str, state: Path) -> Documents:
    """Read what the coordinator sent, and make the run's folder. Blocks for as long as YAML takes.

    Raises:
        SiteError: a document is wrong here, or not what the coordinator makes of it.
    """
    job, topology = _load(prepare)
    ours = config_hash(job, topology)
    if ours != prepare.config_hash:
        raise SiteError(
            "CONFIG_MISMATCH",
            f"site {site} resolves the configuration to {ours[:12]}, the coordinator to "
            f"{prepare.config_hash[:12] or 'nothing'}: give both the same version of isthmus",
        )
    try:
        place = topology.site(site)
    except KeyError:
        raise SiteError("INVALID_CONFIG", f"the topology has no site {site!r}") from None
    if job.probe is not None:
        place = replace(place, nodes=1)  # one gateway measures for all
    return Documents(
        run_id=prepare.run_id,
        generation=prepare.generation,
        config_hash=ours,
        job=job,
        topology=topology,
        site=place,
        timeouts=Timeouts.derive(topology.failure),
        folder=_make_folder(prepare, state, place.nodes),
        command=_command(job, prepare.job),
        overrides=json.dumps(
            {"job": list(prepare.job.overrides), "topology": list(prepare.topology.overrides)}
        ),
    )


def _load(prepare: Prepare) -> tuple[Job, Topology]:
    try:
        run = load_run(*map(_text, (prepare.job, prepare.topology)))
    except ConfigError as error:
        raise SiteError("INVALID_CONFIG", one_line(str(error.problems[0]))) from error
    return run.job, run.topology


def _text(document: Document) -> DocumentText:
    return DocumentText(document.text, document.source, document.overrides)


def _make_folder(prepare: Prepare, state: Path, nodes: int) -> Path:
    """Make the run's folder with both documents.

    An embedded agent's state lies inside its run's folder already; an agent that serves many runs
    keeps them apart.
    """
    if not _RUN_ID.fullmatch(prepare.run_id):
        raise SiteError("PROTOCOL_VIOLATION", f"{prepare.run_id!r} is no name of a run")
    state = state.resolve()
    folder = state if prepare.run_id in state.parts else state / prepare.run_id
    try:
        for node in range(nodes):
            (folder / f"node{node}").mkdir(parents=True, exist_ok=True)
        (folder / "job.yaml").write_text(prepare.job.text, encoding="utf-8")
        (folder / "topology.yaml").write_text(prepare.topology.text, encoding="utf-8")
    except OSError as error:
        raise SiteError("LAUNCH_FAILED", f"{folder}: {error.strerror}") from error
    return folder


def _command(job: Job, document: Document) -> tuple[str, ...]:
    """Return what a rank runs. A script's path is relative to the job file."""
    if job.entrypoint is None:
        return ("-m", TRAINER, *job.arguments)
    script = Path(document.source).parent.joinpath(job.entrypoint).resolve()
    if not script.is_file():
        raise SiteError("LAUNCH_FAILED", f"entrypoint: there is no file {script} at this site")
    return (str(script), *job.arguments)
