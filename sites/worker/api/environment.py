"""What the launcher tells a rank through its environment: docs/protocols.md."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import get_worker_info

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Accelerator, Detection, Site, Topology

_NAMES = (
    "ISTHMUS_RUN",
    "ISTHMUS_GENERATION",
    "ISTHMUS_SITE",
    "ISTHMUS_GATEWAY",
    "ISTHMUS_SPEC",
    "ISTHMUS_RUN_FOLDER",
)

_JOINED = "ISTHMUS_JOINED"
"""Set by the rank itself, once it has joined: its process id, and its place in the run. Processes
that it starts inherit it."""


class NotLaunchedError(RuntimeError):
    """The script was not started by isthmus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A rank's place in a run."""

    run: str
    generation: int
    site: str
    gateway: Path
    """The socket of the rank's gateway."""
    spec: RunSpec
    run_folder: Path
    rejoins: bool = False
    """The site comes into a run that goes on."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        """Read the variables, and the file with the run's spec.

        Raises:
            NotLaunchedError: none of the variables is there.
            ConfigError: some are missing or wrong, or the file is.
        """
        missing = [name for name in _NAMES if name not in environ]
        if len(missing) == len(_NAMES):
            raise NotLaunchedError(
                "isthmus.join: this process was not started by isthmus (no ISTHMUS_GATEWAY). Start "
                "the script with `isthmus launch`, or call isthmus.join(alone=True) to train one "
                "site by itself."
            )
        if missing:
            raise ConfigError(f"environment: {', '.join(missing)} not set; is the launcher older?")
        path = Path(environ["ISTHMUS_SPEC"])
        try:
            written = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        site, run_folder = environ["ISTHMUS_SITE"], Path(environ["ISTHMUS_RUN_FOLDER"])
        return cls(
            run=environ["ISTHMUS_RUN"],
            generation=_number("ISTHMUS_GENERATION", environ["ISTHMUS_GENERATION"]),
            site=site,
            gateway=_gateway(environ),
            spec=_at(RunSpec.from_bytes(written), site, run_folder),
            run_folder=run_folder,
            rejoins=environ.get("ISTHMUS_RETURNS") == "1",
        )


def check_is_own_process(launched: Environment, environ: Mapping[str, str]) -> None:
    """Refuse to join in a process that a rank started after it had joined itself.

    Multiprocessing under spawn or forkserver imports the script again in each of its processes.

    Raises:
        RuntimeError: and what to do.
    """
    pid, _, place = environ.get(_JOINED, "").partition(" ")
    worker = get_worker_info()
    if worker is not None:
        here = f"DataLoader worker {worker.id}"
    elif place == _place(launched) and pid != str(os.getpid()):
        here = f"process {os.getpid()}, which is a worker of the rank in process {pid}"
    else:
        return
    raise RuntimeError(
        f"isthmus.join: called in {here}: only the rank itself joins, once. Call it below "
        '`if __name__ == "__main__":`, and give workers what they need as plain numbers '
        "(site.global_rank). Of a program of its own, remove ISTHMUS_GATEWAY and the other "
        "variables that begin with ISTHMUS_ from its environment"
    )


def note_joined(launched: Environment, environ: MutableMapping[str, str]) -> None:
    """Let processes that this one starts know that it has joined."""
    environ[_JOINED] = f"{os.getpid()} {_place(launched)}"


def _place(launched: Environment) -> str:
    return f"{launched.run} {launched.generation} {launched.site} {launched.gateway}"


def lone_spec(num_ranks: int) -> RunSpec:
    """Return a run on one site without links, for a script that runs by itself."""
    unknown = Accelerator.named("unknown")
    site = Site(
        name="alone",
        index=0,
        nodes=1,
        accelerators_per_node=num_ranks,
        accelerator=unknown,
    )
    topology = Topology(
        name="alone",
        sites=(site,),
        links=(),
        failure=Detection(detect_within_s=15.0, start_within_s=600.0),
    )
    job = Job(name="alone", topology="")
    return RunSpec(
        job=job,
        topology=topology,
        reduction=CodedPlan(ReductionPlan(1, (), "one site: nothing crosses"), ("fp32",)),
        chunk_bytes=job.exchange.chunk_bytes,
        pipeline_bytes=0,
        timeouts=Timeouts.derive(topology.failure),
    )


def _at(spec: RunSpec, site: str, run_folder: Path) -> RunSpec:
    """Return the spec with the paths of the job's files as they are at a site."""
    try:
        return dataclasses.replace(spec, job=spec.job_at(site, run_folder))
    except KeyError as error:
        raise ConfigError(f"environment: ISTHMUS_SITE: the run has no site {site!r}") from error


def _gateway(environ: Mapping[str, str]) -> Path:
    """Return the socket of this rank's gateway: a node's gateways divide its ranks evenly."""
    paths = environ["ISTHMUS_GATEWAY"].split(os.pathsep)
    if len(paths) == 1:
        return Path(paths[0])
    rank, num_ranks = (
        _number(name, environ.get(name, "")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    return Path(paths[rank * len(paths) // num_ranks])


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment: {name}: want a whole number, got {text!r}") from error
