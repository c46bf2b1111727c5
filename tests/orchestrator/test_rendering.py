"""What `isthmus render` writes, against the schemas of Kubernetes and of JobSet.

Of JobSet only the schema is checked, as its v1alpha2 CRD has it: nothing here was ever applied to
an API server.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from orchestrator.rendering.kubernetes import Wishes, coordinator_objects, secret_of, site_objects
from orchestrator.rendering.slurm_script import slurm_script
from topology.documents.load import load_topology
from topology.errors import ConfigError
from topology.world import Topology

VERSIONS = ("1.29", "1.34", "1.37")
MANUAL = Path(__file__).parents[2] / "docs" / "operating.md"
CONTAINERFILE = Path(__file__).parents[2] / "examples" / "Containerfile"
WISHES = Wishes(image="registry.example/isthmus:1", coordinator="192.0.2.3:7443")
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object that has nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


JOBSET = closed(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object"},
        "spec": closed(
            {
                "replicatedJobs": {
                    "type": "array",
                    "items": closed(
                        {
                            "name": TEXT,
                            "groupName": TEXT,
                            "replicas": COUNT,
                            "template": closed(
                                {"metadata": {"type": "object"}, "spec": {"type": "object"}}
                            ),
                            "dependsOn": {"type": "array"},
                        },
                        "name",
                        "template",
                    ),
                },
                "network": closed(
                    {
                        "enableDNSHostnames": {"type": "boolean"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                        "subdomain": TEXT,
                    }
                ),
                "successPolicy": closed(
                    {
                        "operator": {"enum": ["All", "Any"]},
                        "targetReplicatedJobs": {"type": "array", "items": TEXT},
                    },
                    "operator",
                ),
                "failurePolicy": closed(
                    {
                        "maxRestarts": COUNT,
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                        "rules": {"type": "array"},
                    }
                ),
                "startupPolicy": closed(
                    {"startupPolicyOrder": {"enum": ["AnyOrder", "InOrder"]}}, "startupPolicyOrder"
                ),
                "coordinator": closed(
                    {"replicatedJob": TEXT, "jobIndex": COUNT, "podIndex": COUNT}, "replicatedJob"
                ),
                "managedBy": TEXT,
                "suspend": {"type": "boolean"},
                "ttlSecondsAfterFinished": COUNT,
            }
        ),
    },
    "apiVersion",
    "kind",
    "spec",
)
"""The part of the CRD above the Job's template, which is checked as a Job."""


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


def objects() -> list[dict[str, Any]]:
    topology = described()
    made = coordinator_objects(topology, text(), WISHES)
    for site in topology.sites:
        made += site_objects(topology, site, text(), WISHES)
    return made


def pods(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [each["spec"]["template"]["spec"] for each in made if each["kind"] == "StatefulSet"]
    for each in made:
        if each["kind"] == "JobSet":
            found += [
                job["template"]["spec"]["template"]["spec"]
                for job in each["spec"]["replicatedJobs"]
            ]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_as_the_schemas_want_it(version: str) -> None:
    for made in objects():
        if made["kind"] != "JobSet":
            kubernetes_validate.validate(made, version, strict=True)
            continue
        jsonschema.validate(made, JOBSET)
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
        jsonschema.validate(jobset, JOBSET)


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
        assert [each["port"] for each in outside["spec"]["ports"]] == [29500, 29501]


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
        assert pod["terminationGracePeriodSeconds"] >= 20 + 5
        (container,) = pod["containers"]
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
        ((", ports: 29500-29501", ""), "wan.ports"),
        (("nodes: 1", "nodes: 2"), "nodes"),
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
    assert "cd ~/'it'\"'\"'s here' || exit 1\n" in script
    assert "'/opt/my env/bin/python' -m sites.agent" in script


@pytest.mark.slow
def test_the_manual_followed_literally_as_far_as_it_runs_here(tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(text())
    (commands,) = blocks("two-sites-on-kubernetes", "sh")
    for command in commands.splitlines():
        words = command.removeprefix("isthmus ").split()
        subprocess.run(
            [sys.executable, "-m", "orchestrator.cli.main", *words],
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
