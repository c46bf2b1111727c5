"""What `isthmus render` writes, against the schemas of Kubernetes and of JobSet.

test_kubernetes_server.py applies it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from isthmus.orchestrator.rendering.kubernetes import (
    Wishes,
    coordinator_objects,
    secret_of,
    site_objects,
)
from isthmus.orchestrator.rendering.slurm_script import slurm_script
from isthmus.protos.save_time import LEAVE_S, SAVE_WITHIN
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Launcher, Topology
from tests.fakes.kubernetes_server import jobset_schema

VERSIONS = ("1.29", "1.34", "1.37")
MANUAL = Path(__file__).parents[2] / "docs" / "sites.md"
CONTAINERFILE = Path(__file__).parents[2] / "examples" / "Containerfile"
WISHES = Wishes(image="registry.example/isthmus:1", coordinator="192.0.2.3:7443")


def blocks(section: str, kind: str) -> list[str]:
    """Return the blocks of a language in a section of the manual."""
    text = MANUAL.read_text().partition(f'<a id="{section}">')[2].partition("\n## ")[0]
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [
        "\n".join(line.removeprefix(indent) for line in block.split("\n"))
        for indent, block in found
    ]


def text() -> str:
    """Return the manual's topology."""
    return blocks("two-sites-on-kubernetes", "yaml")[0]


def described(change: tuple[str, str] = ("", "")) -> Topology:
    assert change[0] in text()
    return load_topology(text().replace(*change), "topology.yaml")


def objects(written: str | None = None) -> list[dict[str, Any]]:
    """Return the objects of the manual's topology, or of another one."""
    written = written or text()
    topology = load_topology(written, "topology.yaml")
    made = coordinator_objects(topology, written, WISHES)
    for site in topology.sites:
        made += site_objects(topology, site, written, WISHES)
    return made


def of_two_nodes() -> str:
    """Return the manual's topology, where `eu` has two machines."""
    changed = text().replace("nodes: 1", "nodes: 2\n    hosts: [203.0.113.7, 203.0.113.8]", 1)
    changed = changed.replace("address: 203.0.113.7, ", "")
    return changed.replace("like: eu\n", "like: eu\n    nodes: 1\n")


def pods(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [each["spec"]["template"]["spec"] for each in made if each["kind"] == "StatefulSet"]
    for each in made:
        if each["kind"] == "JobSet":
            found += [
                job["template"]["spec"]["template"]["spec"]
                for job in each["spec"]["replicatedJobs"]
            ]
    return found


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    "version",
    [*(pytest.param(old, marks=pytest.mark.exhaustive) for old in VERSIONS[:-1]), VERSIONS[-1]],
)
def test_every_object_is_as_the_schemas_want_it(version: str, nodes: int) -> None:
    for made in objects(text() if nodes == 1 else of_two_nodes()):
        if made["kind"] != "JobSet":
            kubernetes_validate.validate(made, version, strict=True)
            continue
        jsonschema.validate(made, jobset_schema())
        for job in made["spec"]["replicatedJobs"]:
            as_job = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": job["name"]},
                "spec": job["template"]["spec"],
            }
            kubernetes_validate.validate(as_job, version, strict=True)


def test_the_schemas_find_what_is_misspelt() -> None:
    (jobset, *_) = [each for each in objects() if each["kind"] == "JobSet"]
    jobset["spec"]["netwerk"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, jobset_schema())


def test_each_site_has_a_jobset_a_headless_service_and_a_volume() -> None:
    topology = described()
    for site in topology.sites:
        made = site_objects(topology, site, text(), WISHES)
        assert [each["kind"] for each in made] == [
            *("ConfigMap", "PersistentVolumeClaim", "Service", "Service", "JobSet")
        ]
        inside, outside = (each for each in made if each["kind"] == "Service")
        jobset = made[-1]
        assert inside["spec"]["clusterIP"] == "None"
        assert jobset["spec"]["network"]["subdomain"] == inside["metadata"]["name"]
        assert [each["port"] for each in outside["spec"]["ports"]] == [29500]


def test_a_site_of_two_machines_has_a_pod_and_a_service_for_each() -> None:
    topology = load_topology(of_two_nodes(), "topology.yaml")
    eu, us = topology.sites
    made = site_objects(topology, eu, of_two_nodes(), WISHES)
    (jobset,) = (each for each in made if each["kind"] == "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 2, 2)
    chosen = {
        each["spec"]["selector"].get("batch.kubernetes.io/job-completion-index"): [
            port["port"] for port in each["spec"]["ports"]
        ]
        for each in made
        if each["kind"] == "Service" and each["spec"].get("type") == "LoadBalancer"
    }
    assert chosen == {"0": [29500], "1": [29500]}
    (claim,) = (each for each in made if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    # One machine: a pod as before.
    (pod,) = pods(site_objects(topology, us, of_two_nodes(), WISHES))
    assert "command" not in pod["containers"][0]


@pytest.mark.parametrize("index", [0, 1])
def test_pod_0_runs_the_agent_and_the_others_wait_for_it(index: int, tmp_path: Path) -> None:
    topology = load_topology(of_two_nodes(), "topology.yaml")
    (pod,) = pods(site_objects(topology, topology.site("eu"), of_two_nodes(), WISHES))
    (container,) = pod["containers"]
    for name in ("isthmus", "python"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$(basename "$0")" "$@"\n')
        (tmp_path / name).chmod(0o755)
    said = subprocess.run(
        container["command"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    name = "isthmus-two-sites-eu"
    nodes = [f"{name}-node-0-{each}.{name}:7444" for each in range(2)]
    if index == 0:
        assert said[:4] == ["isthmus", "agent", "--site", "eu"]
        assert [said[at + 1] for at, word in enumerate(said) if word == "--node"] == nodes
    else:
        assert said == [
            *[
                "python",
                "-P",
                "-m",
                "isthmus.sites.node.serve",
                "--site",
                "eu",
                "--bind",
                "0.0.0.0:7444",
            ]
        ]
    is_ready = subprocess.run(
        container["readinessProbe"]["exec"]["command"],
        env={"PATH": "/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
        check=False,
    )
    assert is_ready.returncode == (1 if index == 0 else 0)


@pytest.mark.slow
def test_the_lines_for_secrets_name_the_files_where_they_are(tmp_path: Path) -> None:
    written = text().replace("mode: mtls", 'mode: mtls, key: "secret/{name}.pem"')
    (tmp_path / "topology.yaml").write_text(written)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "isthmus.orchestrator.cli.main", "render", "kubernetes"),
            *("topology.yaml", "--image", "x"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = (each for each in done.stderr.splitlines() if each.startswith("us:"))
    assert "--from-file=certs/us.agent.pem" in line
    assert "--from-file=us.agent.key=secret/us.agent.pem" in line


def test_pods_may_do_nothing_that_they_need_not() -> None:
    for pod in pods(objects()):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounted = {each["name"] for each in container["volumeMounts"]}
            given = {each["name"] for each in pod["volumes"]}
            assert mounted <= given | {"state"}  # which a StatefulSet's template gives


def test_an_agent_has_its_accelerators_and_the_time_for_a_checkpoint() -> None:
    _, *sites = pods(objects())
    for pod in sites:
        (container,) = pod["containers"]
        env = {each["name"]: each["value"] for each in container["env"]}
        assert pod["terminationGracePeriodSeconds"] == float(env[SAVE_WITHIN]) + LEAVE_S == 45
        resources = container["resources"]
        assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
        assert resources["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize(
    ("accelerator", "resource"),
    [("cpu", None), ("mi300x", "amd.com/gpu"), ("tpu-v5e", "google.com/tpu")],
)
def test_an_accelerator_is_asked_for_by_its_makers_name(
    accelerator: str, resource: str | None
) -> None:
    topology = described(("accelerator: h100-sxm", f"accelerator: {accelerator}"))
    (pod,) = pods(site_objects(topology, topology.site("eu"), text(), WISHES))
    wanted = set(pod["containers"][0]["resources"]["limits"])
    assert wanted == {"memory", *([resource] if resource else [])}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("mode: mtls", "mode: insecure"), "security"),
        ((", ports: 29500-29500", ""), "wan.ports"),
        (("nodes: 1", "nodes: 2"), "hosts"),
        (("name: us", "name: EU"), "two names for one"),
    ],
)
def test_what_cannot_be_deployed_is_refused(change: tuple[str, str], named: str) -> None:
    addresses = ("203.0.113.7", "198.51.100.9", "192.0.2.3")
    changed = text().replace(*change)
    if "insecure" in change[1]:
        for index, address in enumerate(addresses):
            changed = changed.replace(address, f"127.0.0.{2 + index}")
    if change[1] == "name: EU":
        changed = changed.replace("[eu, us]", "[eu, EU]")
    topology = load_topology(changed, "topology.yaml")
    with pytest.raises(ConfigError, match=named):
        site_objects(topology, topology.sites[0], changed, WISHES)


def test_a_secret_holds_what_its_party_needs_and_no_more() -> None:
    name, files = secret_of(described(), "eu")
    assert name == "isthmus-two-sites-eu-certs"
    assert files == ["ca.pem", "eu.agent.pem", "eu.agent.key", "eu.gateway.pem", "eu.gateway.key"]


def test_the_image_has_the_user_of_the_pods() -> None:
    assert "USER 1000:1000" in CONTAINERFILE.read_text()


def test_a_batch_script_is_one_of_the_shell() -> None:
    topology = described()
    script = slurm_script(
        topology,
        topology.site("eu"),
        "192.0.2.3:7443",
        python="/opt/my env/bin/python",
        folder="~/it's here",
        environment={"ISTHMUS_CERT": "/certs/{name}.pem"},
    )
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "#SBATCH --requeue\n" in script
    assert "cd -- ~/'it'\"'\"'s here' || exit 1\n" in script
    assert "'/opt/my env/bin/python' -m isthmus.sites.agent" in script


def test_options_are_words_of_a_batch_script_and_no_more(tmp_path: Path) -> None:
    written = text().replace("name: eu\n", "name: eu\n    launcher: {kind: slurm}\n", 1)
    topology = load_topology(written, "topology.yaml")
    hostile = ("--comment=a b # c", "-p", "gpu;touch $HOME")
    site = dataclasses.replace(
        topology.site("eu"), launcher=Launcher(kind="slurm", options=hostile)
    )
    script = slurm_script(
        topology, site, "192.0.2.3:7443", python="python3", folder="-v", environment={}
    )
    (line,) = [each for each in script.splitlines() if "--comment" in each]
    assert shlex.split(line.removeprefix("#SBATCH ")) == list(hostile)
    assert "mkdir -p -- -v\n" in script


def test_a_heterogeneous_job_has_the_options_of_each_component() -> None:
    written = text().replace("name: eu\n", "name: eu\n    launcher: {kind: slurm}\n", 1)
    topology = load_topology(written, "topology.yaml")
    options = ("--partition=a100", "--nodes=2", ":", "--partition=h100", "--nodes=1")
    site = dataclasses.replace(
        topology.site("eu"), nodes=3, launcher=Launcher(kind="slurm", options=options)
    )
    script = slurm_script(
        topology, site, "192.0.2.3:7443", python="python3", folder="here", environment={}
    )
    first, second = script.split("#SBATCH hetjob\n")
    assert "#SBATCH --partition=a100 --nodes=2\n" in first
    assert "#SBATCH --partition=h100 --nodes=1\n" in second
    assert "--nodes=3" not in script


def test_an_override_is_not_expanded_by_kubernetes() -> None:
    wishes = dataclasses.replace(WISHES, overrides=("name=$(HOME)",))
    (args,) = [
        container["args"]
        for pod in pods(coordinator_objects(described(), text(), wishes))
        for container in pod["containers"]
    ]
    assert args[-1] == "name=$$(HOME)"


@pytest.mark.slow
def test_the_manual_followed_literally_as_far_as_it_runs_here(tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(text())
    (commands,) = blocks("two-sites-on-kubernetes", "sh")
    for command in commands.splitlines():
        words = command.removeprefix("isthmus ").split()
        subprocess.run(
            [sys.executable, "-m", "isthmus.orchestrator.cli.main", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    files = sorted(path.name for path in (tmp_path / "rendered").iterdir())
    assert files == ["coordinator.yaml", "eu.yaml", "us.yaml"]
    written = [
        made
        for name in files
        for made in yaml.safe_load_all((tmp_path / "rendered" / name).read_text())
    ]
    assert written == objects()
    for party in ("coordinator", "eu", "us"):
        _, needed = secret_of(described(), party)
        assert all((tmp_path / "certs" / file).is_file() for file in needed)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_train_job_has_a_runtime_that_kubeflow_takes(nodes: int) -> None:
    from kubeflow_trainer_api import models  # takes seconds

    written = text() if nodes == 1 else of_two_nodes()
    topology = load_topology(written, "topology.yaml")
    wishes = dataclasses.replace(WISHES, is_train_job=True, queue="night")
    *_, runtime, job = site_objects(topology, topology.site("eu"), written, wishes)
    of_runtime = models.TrainerV1alpha1TrainingRuntime.from_dict(runtime)
    of_job = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert of_runtime.to_dict() == runtime, "no key is misspelt"
    assert of_job.to_dict() == job
    assert of_job.spec.runtime_ref.name == of_runtime.metadata.name == "isthmus-two-sites-eu"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"
    assert set(runtime["spec"]["mlPolicy"]) == {"numNodes"}, "no framework's environment"
    (jobset,) = (
        each
        for each in site_objects(topology, topology.site("eu"), written, WISHES)
        if each["kind"] == "JobSet"
    )
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"] == jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_a_jobset_waits_in_the_queue_that_is_named() -> None:
    wishes = dataclasses.replace(WISHES, queue="night")
    made = site_objects(described(), described().site("eu"), text(), wishes)
    assert made[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"


def sky_group(tmp_path: Path, written: str, *options: str) -> list[dict[str, Any]]:
    (tmp_path / "topology.yaml").write_text(written)
    command = [sys.executable, "-m", "isthmus.orchestrator.cli.main", "render", "skypilot"]
    subprocess.run([*command, "topology.yaml", *options], cwd=tmp_path, check=True)
    return [*yaml.safe_load_all((tmp_path / "rendered" / "sky.yaml").read_text())]


@pytest.mark.slow
def test_a_job_group_has_a_task_for_each_site(tmp_path: Path) -> None:
    options = ("--accelerator", "us=A100-80GB", "--infra", "us=aws/us-east-1")
    header, eu, us = sky_group(tmp_path, of_two_nodes(), *options)
    assert header == {"name": "two-sites", "execution": "parallel", "inter_connection": False}
    assert [each["name"] for each in (eu, us)] == ["eu", "us"]
    assert (eu["num_nodes"], us["num_nodes"]) == (2, 1)
    assert us["resources"]["accelerators"].startswith("A100-80GB:")
    assert us["resources"]["infra"] == "aws/us-east-1"
    assert eu["file_mounts"]["~/isthmus/topology.yaml"] == str(tmp_path / "topology.yaml")
    assert eu["file_mounts"]["~/isthmus/given/eu.gateway.key"].endswith("/certs/eu.gateway.key")
    assert not [each for each in us["file_mounts"] if "eu." in each], "no other site's keys"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_machine_of_a_task_runs_the_agent(rank: int, tmp_path: Path) -> None:
    _, eu, _ = sky_group(tmp_path, of_two_nodes())
    given = tmp_path / "isthmus" / "given"
    given.mkdir(parents=True)
    (given / "eu.agent.key").write_text("secret")
    (tmp_path / "bin").mkdir()
    for name in ("isthmus", "python"):
        (tmp_path / "bin" / name).write_text(
            '#!/bin/sh\nls -l certs >&2; echo "$(basename "$0")" "$@"\n'
        )
        (tmp_path / "bin" / name).chmod(0o755)
    addresses = ["198.51.100.1", "198.51.100.2"]
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
    }
    command = ["bash", "-c", eu["run"]]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    words = said.stdout.split()
    assert "-rw-------" in said.stderr, "a key is its reader's alone"
    if rank == 0:
        assert words[:4] == ["isthmus", "agent", "--site", "eu"]
        nodes = [words[at + 1] for at, word in enumerate(words) if word == "--node"]
        assert nodes == [f"{each}:7444" for each in addresses]
    else:
        assert words[:4] == ["python", "-P", "-m", "isthmus.sites.node.serve"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_skypilot_reads_the_job_group(tmp_path: Path) -> None:
    """By its own package, in an environment of its own: it brings a hundred others."""
    sky_group(tmp_path, of_two_nodes())
    reads = (
        "import sys; from sky.utils import dag_utils; p = sys.argv[1]; "
        "assert dag_utils.is_job_group_yaml(p); dag = dag_utils.load_job_group_from_yaml(p); "
        "print(dag.inter_connection, [(t.name, t.num_nodes) for t in dag.tasks])"
    )
    group = str(tmp_path / "rendered" / "sky.yaml")
    command = ["uv", "run", "--no-project", "--with", "skypilot==0.14.1", "python", "-c", reads]
    (tmp_path / "certs").mkdir(exist_ok=True)
    home = {**os.environ, "HOME": str(tmp_path)}
    path = f"{Path(sys.executable).parent}:{home['PATH']}"
    read = subprocess.run(
        [*command, group],
        env={**home, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr[-2000:]
    assert read.stdout.splitlines()[-1] == "False [('eu', 2), ('us', 1)]"
