"""Reads a site's order for a run from the coordinator's Prepare, and writes its files."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from isthmus.protos.control.v1.control_pb2 import Prepare
from isthmus.protos.failure import one_line
from isthmus.sites.facts.files import cannot_enter
from isthmus.sites.node.carried import blobs_of, lay_out
from isthmus.sites.node.failures import SiteError
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.run_spec import RunSpec, spec_hash
from isthmus.topology.spec.world import Site

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Allowed run ids; they become part of paths."""
TRAINER = "isthmus.sites.trainer"
"""The module that runs when the job names no script."""
SPEC_FILE = "run_spec.json"
"""The file in the run's folder that ranks read."""
DATA = "data"
"""Folder in the run's folder with the job's data that has no path of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOrder:
    """One run, as one site has to carry it out."""

    run_id: str
    generation: int
    spec: RunSpec
    spec_hash: str
    """Hash of the run's spec, equal at all sites."""
    site: Site
    """This site; in a probe reduced to its first node."""
    folder: Path
    """The run's folder at this site."""
    command: tuple[str, ...]
    """A rank's command: script and arguments, or -m, module and arguments."""
    working_folder: Path
    """Working directory of the ranks."""
    job_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables from the job for each rank, secrets included."""
    returns: bool = False
    """Whether the run goes on meanwhile and the site rejoins it."""
    revoked: str = ""
    """List of revoked certificates (PEM); empty: there is none."""

    @property
    def name(self) -> str:
        """Name of the rendezvous, which processes of earlier generations cannot join."""
        return f"{self.run_id}-{self.generation}"

    def node_folder(self, node: int) -> Path:
        """Return the folder of one node's logs."""
        return self.folder / f"node{node}"

    def node_gateways(self, node: int) -> range:
        """Return the gateways of one node, by their numbers at the site."""
        count = self.site.gateways_per_node
        return range(node * count, (node + 1) * count)

    def gateway_log(self, gateway: int) -> Path:
        """Return the file that one gateway logs to."""
        node = gateway // self.site.gateways_per_node
        return self.node_folder(node) / f"gateway{gateway}.log"

    def environment(self, sockets: Iterable[Path]) -> dict[str, str]:
        """Return the environment variables added for a node's ranks.

        docs/protocols.md has the names; the job's own are included.

        `sockets` are those of the node's gateways.
        """
        environment = {
            **self.job_env,
            "ISTHMUS_RUN": self.run_id,
            "ISTHMUS_GENERATION": str(self.generation),
            "ISTHMUS_SITE": self.site.name,
            "ISTHMUS_GATEWAY": os.pathsep.join(map(str, sockets)),
            "ISTHMUS_SPEC": str(self.folder / SPEC_FILE),
            "ISTHMUS_RUN_FOLDER": str(self.folder),
            **({"ISTHMUS_DATA": str(self.folder / DATA)} if self.spec.job.data else {}),
        }
        return environment | ({"ISTHMUS_RETURNS": "1"} if self.returns else {})


def read_spec(prepare: Prepare, site: str) -> RunSpec:
    """Read the run's spec in the coordinator's Prepare.

    Raises:
        SiteError: this build cannot read it.
    """
    try:
        return RunSpec.from_bytes(prepare.run_spec)
    except ConfigError as error:
        raise SiteError("CONFIG_MISMATCH", one_line(error.problems[0].message)) from error


def make_order(prepare: Prepare, spec: RunSpec, site: str, state: Path) -> SiteOrder:
    """Make the run's folder, with its copy of what was carried here, and return the order.

    Raises:
        SiteError: a file that the run needs is missing.
    """
    try:
        place = spec.topology.site(site)
    except KeyError:
        raise SiteError("INVALID_CONFIG", f"the topology has no site {site!r}") from None
    if spec.job.probe is not None:
        place = replace(place, nodes=1, gateways_per_node=1)  # one gateway measures for all
    folder = _make_folder(prepare, state, place.nodes)
    if spec.is_carried_to(site):
        lay_out(blobs_of(state), spec, folder)
    job = spec.job_at(site, folder)
    return SiteOrder(
        run_id=prepare.run_id,
        generation=prepare.generation,
        spec=spec,
        spec_hash=spec_hash(prepare.run_spec),
        site=place,
        folder=folder,
        command=_command(job, site),
        working_folder=_working_folder(spec.working_folder_at(site, folder), folder, site),
        job_env=_job_env(job, prepare.passed_env),
        returns=prepare.returns,
        revoked=prepare.revoked,
    )


def _make_folder(prepare: Prepare, state: Path, nodes: int) -> Path:
    """Make the run's folder, with the spec and its source documents.

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
        # Nodes that share the folder write the same content.
        scratch = folder / f"{SPEC_FILE}.{platform.node()}.{os.getpid()}"
        scratch.write_bytes(prepare.run_spec)
        scratch.replace(folder / SPEC_FILE)
        (folder / "job.yaml").write_text(prepare.job.text, encoding="utf-8")
        (folder / "topology.yaml").write_text(prepare.topology.text, encoding="utf-8")
    except OSError as error:
        raise SiteError("LAUNCH_FAILED", f"{folder}: {error.strerror}") from error
    return folder


def _command(job: Job, site: str) -> tuple[str, ...]:
    """Return a rank's command."""
    if job.entrypoint is None:
        return ("-m", TRAINER, *job.arguments)
    script = Path(job.entrypoint).resolve()
    if not script.exists():  # a folder with a __main__.py will do
        raise _not_here(f"entrypoint: there is no file {script}", site)
    return (str(script), *job.arguments)


def _working_folder(named: str | None, run_folder: Path, site: str) -> Path:
    """Return the ranks' working directory; by default a folder of the run."""
    if named is None:
        return run_folder
    if (reason := cannot_enter(named)) is not None:
        raise _not_here(f"the script cannot run in {named}: {reason}", site)
    return Path(named)


def _not_here(what: str, site: str) -> SiteError:
    return SiteError(
        "LAUNCH_FAILED",
        f"{what} at site {site} ({platform.node()}): have the job's files lie there under the same "
        f"path as where it was launched, or say where they are: job_folder of site {site} in the "
        "topology",
    )


def _job_env(job: Job, passed: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the job, with the values of those that it only names."""
    if missing := [name for name in job.pass_env if name not in passed]:
        raise SiteError(
            "CONFIG_MISMATCH",
            f"pass_env: the coordinator has no value of {', '.join(missing)}: launch the job again "
            "from an environment that has it",
        )
    return {each.name: each.value for each in job.env} | {
        name: passed[name] for name in job.pass_env
    }
