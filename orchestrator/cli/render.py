"""`isthmus render`: files that have Slurm, Kubernetes or SkyPilot start a topology's sites."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import yaml

from isthmus.orchestrator.cli.options import (
    ADDRESS,
    FOLDER,
    json_option,
    set_option,
    topology_argument,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.documents import load_topology_file, protect, read_text
from isthmus.orchestrator.launchers.commands import folder_at, python_at, save_s
from isthmus.orchestrator.rendering import kubernetes, skypilot
from isthmus.orchestrator.rendering.site_agent import files_of
from isthmus.orchestrator.rendering.slurm_script import slurm_script
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.identities import COORDINATOR
from isthmus.protos.save_time import SAVE_WITHIN
from isthmus.protos.security import TLS_VARIABLES, tls_files
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.world import Topology


class _Dumper(yaml.SafeDumper):
    """Writes YAML without aliases, and texts of several lines as blocks."""

    def ignore_aliases(self, _data: object) -> bool:
        """Repeat what objects share: no aliases."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Write several lines as a block."""
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)

out_option = click.option(
    "--out", type=FOLDER, default="rendered", help="Folder into which the files are written."
)
coordinator_option = click.option(
    "--coordinator",
    type=ADDRESS,
    help="Where sites reach the coordinator. [the topology's coordinator.address, else its bind]",
)


@click.group("render")
@json_option
def command() -> None:
    """Write files that have Slurm, Kubernetes or SkyPilot start the sites of a topology."""


@command.command("slurm")
@topology_argument
@out_option
@coordinator_option
@set_option
@with_output
def slurm_command(
    output: Output,
    topology_path: Path,
    out: Path,
    coordinator: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Write a batch script for each site under Slurm, SITE.sbatch."""
    topology = load_topology_file(topology_path, overrides)
    protect(topology, topology_path)
    address = _address(topology_path, topology, coordinator)
    environment = {
        variable: os.environ[variable]
        for variable in TLS_VARIABLES.values()
        if topology.security.tls_files is not None
    }
    files = {
        f"{site.name}.sbatch": slurm_script(
            topology,
            site,
            address,
            python=python_at(site.launcher),
            folder=folder_at(topology, site.launcher, site.name, out / site.name),
            environment={**environment, SAVE_WITHIN: f"{save_s(site.launcher):g}"},
        )
        for site in topology.sites
        if site.launcher.kind == "slurm"
    }
    if not files:
        raise _mistake(topology_path, "no site has `launcher: {kind: slurm}`")
    return _written(output, out, files)


@command.command("kubernetes")
@topology_argument
@click.option(
    "--image",
    required=True,
    help="The containers' image: it has isthmus, and the job's script and data.",
)
@out_option
@coordinator_option
@click.option("--storage", default="100Gi", help="Size of each site's volume.")
@click.option(
    "--cpus-per-rank",
    type=click.IntRange(min=1),
    default=4,
    help="CPU cores requested for each rank.",
)
@click.option("--memory-per-rank", default="16Gi", help="Memory that each rank may use at most.")
@click.option(
    "--resource",
    help="What Kubernetes calls an accelerator; '': nothing. [what its name suggests: nvidia.com/gpu, ...]",
)
@click.option("--queue", default="", help="Queue of Kueue that admits each site's job.")
@click.option(
    "--train-job",
    "is_train_job",
    is_flag=True,
    help="Write a TrainJob of Kubeflow and its runtime for each site, in place of a JobSet.",
)
@set_option
@with_output
def kubernetes_command(
    output: Output,
    topology_path: Path,
    out: Path,
    coordinator: str | None,
    overrides: tuple[str, ...],
    image: str,
    storage: str,
    cpus_per_rank: int,
    memory_per_rank: str,
    resource: str | None,
    queue: str,
    is_train_job: bool,
) -> int:
    """Write the coordinator's objects, and those of each site, for `kubectl apply -f`."""
    text = read_text(topology_path)
    topology = load_topology_file(topology_path, overrides)
    address = _address(topology_path, topology, coordinator)
    wishes = kubernetes.Wishes(
        image=image,
        coordinator=address,
        storage=storage,
        resource=resource,
        cpus_per_rank=cpus_per_rank,
        memory_per_rank=memory_per_rank,
        overrides=overrides,
        queue=queue,
        is_train_job=is_train_job,
    )
    files = {
        f"{COORDINATOR}.yaml": _documents(kubernetes.coordinator_objects(topology, text, wishes))
    }
    for site in topology.sites:
        objects = kubernetes.site_objects(topology, site, text, wishes)
        files[f"{site.name}.yaml"] = _documents(objects)
    protect(topology, topology_path)
    for party in (COORDINATOR, *(site.name for site in topology.sites)):
        secret, needed = kubernetes.secret_of(topology, party)
        words = shlex.join(f"--from-file={source}" for source in _sources(needed))
        output.note(f"{party}: kubectl create secret generic {secret} {words}")
    return _written(output, out, files)


@command.command("skypilot")
@topology_argument
@out_option
@coordinator_option
@click.option(
    "--install",
    default=skypilot.INSTALL,
    help="The command that installs isthmus on each machine.",
)
@click.option(
    "--accelerator",
    "accelerators",
    multiple=True,
    metavar="SITE=NAME",
    help="SkyPilot's name of a site's accelerator, as east=A100-80GB. [what its name suggests]",
)
@click.option(
    "--infra",
    multiple=True,
    metavar="SITE=PLACE",
    help="Where SkyPilot starts a site, as east=aws/us-east-1. [wherever there is room]",
)
@set_option
@with_output
def skypilot_command(
    output: Output,
    topology_path: Path,
    out: Path,
    coordinator: str | None,
    install: str,
    accelerators: tuple[str, ...],
    infra: tuple[str, ...],
    overrides: tuple[str, ...],
) -> int:
    """Write a job group with a task for each site, for `sky jobs launch`."""
    topology = load_topology_file(topology_path, overrides)
    protect(topology, topology_path)
    wishes = skypilot.Wishes(
        coordinator=_address(topology_path, topology, coordinator),
        topology=str(topology_path.resolve()),
        install=install,
        accelerators=_by_site(topology, accelerators, "--accelerator"),
        infra=_by_site(topology, infra, "--infra"),
        overrides=overrides,
    )
    certificates = {
        site.name: {each: str(_place_of(each).resolve()) for each in files_of(site.name)}
        for site in (topology.sites if topology.security.tls_files is not None else ())
    }
    documents = skypilot.job_group(topology, certificates, wishes)
    return _written(output, out, {"sky.yaml": _documents(documents)})


def _by_site(topology: Topology, given: Iterable[str], option: str) -> dict[str, str]:
    """Return what an option says of sites, each as SITE=TEXT."""
    names = [site.name for site in topology.sites]
    found = {}
    for word in given:
        site, equals, text = word.partition("=")
        if not equals or site not in names:
            sites = ", ".join(names)
            raise click.BadParameter(
                f"{word!r}: want SITE=TEXT, with a site of {sites}", param_hint=option
            )
        found[site] = text
    return found


def _sources(names: Iterable[str]) -> list[str]:
    """Return where the files of a Secret are, for kubectl: `PATH`, or `NAME=PATH`."""
    made = []
    for name in names:
        path = _place_of(name)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        made.append(str(path) if path.name == name else f"{name}={path}")
    return made


def _place_of(name: str) -> Path:
    """Return where a party's certificate or key is, by its name: `eu.agent.pem`."""
    files = tls_files()
    assert files is not None, "it was checked"
    party, _, kind = name.rpartition(".")
    own = files.of(party)
    return Path({"ca.pem": own.ca}.get(name, own.key if kind == "key" else own.cert))


def _address(path: Path, topology: Topology, given: str | None) -> str:
    told = topology.coordinator.dialled
    if given is None and told.port == 0:
        raise _mistake(
            path,
            "coordinator.bind: a port has to be named there, or in coordinator.address, or give "
            "--coordinator",
        )
    return given or str(told)


def _mistake(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(str(path), 0, 0, message, "")])


def _documents(objects: list[kubernetes.Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)


def _written(output: Output, out: Path, files: Mapping[str, str]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    paths = [str(out / name) for name in files]
    return output.result({"files": paths}, "\n".join(paths))
