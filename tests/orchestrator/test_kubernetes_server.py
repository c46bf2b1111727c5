"""What `isthmus render kubernetes` writes, applied to a real API server, with its validation.

Applying on the server's side refuses every field that it does not know; of a JobSet, whose kind is
a custom one, this version drops it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubernetes_server import kubernetes_server
from tests.multiprocess.harness import Bench
from tests.orchestrator.test_rendering import of_two_nodes, text

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(300)]

Object = dict[str, Any]
Apply = Callable[[Object], Object]
NAMESPACE = "default"
LATER_THAN_THE_SERVER = {"completionMode"}
"""Fields of a Job that the version of Kubernetes that can be built here has not yet."""


@pytest.fixture(scope="module")
def apply(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apply]:
    """Return what applies an object by the official client, and gives what the server then has."""
    client = pytest.importorskip("kubernetes")
    dynamic_client: Any = pytest.importorskip("kubernetes.dynamic").DynamicClient

    with kubernetes_server(tmp_path_factory.mktemp("kubernetes") / "here") as config:
        dynamic = dynamic_client(client.config.new_client_from_config(str(config)))

        def applied(made: Object) -> Object:
            kind = dynamic.resources.get(api_version=made["apiVersion"], kind=made["kind"])
            name = made["metadata"]["name"]
            at = {"name": name, "namespace": NAMESPACE}
            kind.server_side_apply(body=made, field_manager="test", **at)
            found: Object = kind.get(**at).to_dict()
            return found

        yield applied


def rendered(folder: Path, topology: str) -> dict[str, list[Object]]:
    """Return what the command writes, by file."""
    bench = Bench(folder)
    (folder / "topology.yaml").write_text(topology)
    bench.isthmus(
        *("render", "kubernetes", str(folder / "topology.yaml"), "--image", "registry.example/x:1"),
        *("--out", str(folder / "rendered")),
    ).check()
    return {
        path.stem: list(yaml.safe_load_all(path.read_text()))
        for path in (folder / "rendered").iterdir()
    }


def lost(wanted: object, found: object, at: str = "") -> Iterator[str]:
    """Yield the places of what was applied and is not there. What the server adds is its own."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, value in wanted.items():
            yield from lost(value, found.get(key), f"{at}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for index, pair in enumerate(zip(wanted, found, strict=True)):
            yield from lost(*pair, f"{at}[{index}]")
    elif wanted != found:
        yield f"{at}: {wanted!r} became {found!r}"


def as_job(jobset: Object) -> Object:
    """Return the Job that a JobSet's controller would make, as far as this server knows it."""
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = {
        key: value
        for key, value in job["template"]["spec"].items()
        if key not in LATER_THAN_THE_SERVER
    }
    name = f"{jobset['metadata']['name']}-{job['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_server_takes_every_object_and_keeps_every_field(
    apply: Apply, tmp_path: Path, nodes: int
) -> None:
    files = rendered(tmp_path, text() if nodes == 1 else of_two_nodes())
    assert set(files) == {"coordinator", "eu", "us"}
    kinds = set()
    for made in [each for objects in files.values() for each in objects]:
        # Each topology has names of its own: pods' templates cannot be changed afterwards.
        made = yaml.safe_load(yaml.safe_dump(made).replace("two-sites", f"sites-{nodes}"))
        kinds.add(made["kind"])
        assert list(lost(made, apply(made))) == []
        if made["kind"] == "JobSet":
            job = as_job(made)
            assert list(lost(job, apply(job))) == []
    assert kinds == {
        *("ConfigMap", "Service", "StatefulSet", "PersistentVolumeClaim", "JobSet"),
    }


def misspelt_service(objects: list[Object]) -> Object:
    (made, *_) = (each for each in objects if each["kind"] == "Service")
    made["spec"]["selektor"] = made["spec"].pop("selector")
    return made


def misspelt_jobset(objects: list[Object]) -> Object:
    made = objects[-1]
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 1
    return made


def negative_port(objects: list[Object]) -> Object:
    (made, *_) = (
        each for each in objects if each["kind"] == "Service" and each["spec"].get("type")
    )
    made["spec"]["ports"][0]["port"] = -1
    return made


def unknown_policy(objects: list[Object]) -> Object:
    made = objects[-1]
    made["spec"]["failurePolicy"]["restartStrategy"] = "Sometimes"
    return made


def two_volumes_of_one_name(objects: list[Object]) -> Object:
    made = as_job(objects[-1])
    volumes = made["spec"]["template"]["spec"]["volumes"]
    volumes.append(copy.deepcopy(volumes[0]) | {"name": "Not_A_Label"})
    return made


def mount_of_nothing(objects: list[Object]) -> Object:
    made = as_job(objects[-1])
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["volumeMounts"].append({"name": "nowhere", "mountPath": "/nowhere"})
    return made


def test_a_misspelt_field_of_a_jobset_would_be_seen(apply: Apply, tmp_path: Path) -> None:
    made = misspelt_jobset(rendered(tmp_path, text().replace("two-sites", "misspelt"))["eu"])
    (place,) = lost(made, apply(made))
    assert "paralelism" in place


@pytest.mark.parametrize(
    "mistake",
    [
        *(misspelt_service, negative_port, unknown_policy),
        *(two_volumes_of_one_name, mount_of_nothing),
    ],
)
def test_mistakes_are_refused(
    apply: Apply, tmp_path: Path, mistake: Callable[[list[Object]], Object]
) -> None:
    made = mistake(rendered(tmp_path, text().replace("two-sites", "mistaken"))["eu"])
    with pytest.raises(Exception, match=r"^(400|422|500)") as refused:
        apply(made)
    assert "kubernetes.dynamic.exceptions" in type(refused.value).__module__
