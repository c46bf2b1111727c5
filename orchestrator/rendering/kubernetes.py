"""The objects of a deployment on Kubernetes: a coordinator, and a JobSet for each site. Pure.

Each site is an own file, for each is likely to be an own cluster. No secret is rendered: who holds
the certificates makes a Secret of those that a party needs, `secret_of`.

A site of several machines has a pod for each. Pod 0 is the agent; the others wait for it to dial
them (sites/node/serve.py).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.rendering.site_agent import (
    ANY,
    CERTIFICATES,
    NODE_PORT,
    SAVE_S,
    TOPOLOGY,
    files_of,
    serve_command,
)
from isthmus.protos.identities import AGENT, COORDINATOR
from isthmus.protos.save_time import LEAVE_S, SAVE_WITHIN
from isthmus.protos.security import TLS_VARIABLES
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Site, Topology

FILES = "/etc/isthmus"
STATE = "/var/lib/isthmus"
TMP, SHARED_MEMORY = "/tmp", "/dev/shm"  # noqa: S108 - a pod's own
AGENT_STATE = f"{TMP}/agent"
GIVEN = "/run/certs-given"
CERTS = "/run/certs"
USER = 1000
"""User id in the containers; the image's Containerfile makes the same user."""
TCP_PORTS = 64
"""Ports of a site at most: its Service names each of them."""
NODE_JOB = "node"
INDEX = "JOB_COMPLETION_INDEX"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Kubernetes gives each pod of an indexed Job both: a variable, and since 1.28 a label."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TRAINER = "trainer.kubeflow.org"
STEP_LABEL = f"{TRAINER}/trainjob-ancestor-step"
"""Tells Kubeflow which of a runtime's jobs trains."""
RESOURCES = (("cpu", ""), ("tpu", "google.com/tpu"), ("mi", "amd.com/gpu"))
"""What Kubernetes calls an accelerator, by how its name here begins; else NVIDIA's."""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a deployment takes beside the topology."""

    image: str
    coordinator: str
    """host:port, as sites reach it."""
    storage: str = "100Gi"
    """Size of each site's volume, for checkpoints and logs."""
    resource: str | None = None
    """What Kubernetes calls an accelerator; empty: none is asked for; None: see RESOURCES."""
    cpus_per_rank: int = 4
    memory_per_rank: str = "16Gi"
    overrides: tuple[str, ...] = ()
    """Changes of the topology, as --set has them."""
    queue: str = ""
    """Queue of Kueue that admits the sites' jobs; empty: none."""
    is_train_job: bool = False
    """Sites are Kubeflow's TrainJobs, each with a runtime of its own, and no JobSets."""


def coordinator_objects(topology: Topology, text: str, wishes: Wishes) -> list[Object]:
    """Return the coordinator's objects; `text` is the topology's file.

    Raises:
        ConfigError: it cannot be deployed so.
    """
    check(topology)
    name = name_of(topology, COORDINATOR)
    port = topology.coordinator.bind.port or _port_of(wishes.coordinator)
    labels = _labels(topology, COORDINATOR)
    answers = {"tcpSocket": {"port": "control"}}
    container = {
        **_container(COORDINATOR, wishes.image),
        "args": [
            *("coordinator", "--topology", f"{FILES}/{TOPOLOGY}"),
            *("--state", f"{STATE}/state", "--bind", f"{ANY}:{port}"),
            *_overrides(wishes),
        ],
        "ports": [{"name": "control", "containerPort": port, "protocol": "TCP"}],
        "readinessProbe": {**answers, "periodSeconds": 5},
        "livenessProbe": {**answers, "periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
    }
    pod = _pod(topology, COORDINATOR, [container], wishes.image)
    state = {
        "metadata": {"name": "state"},
        "spec": _claim("10Gi", "ReadWriteOnce"),
    }
    service = {
        "type": "LoadBalancer",
        "selector": labels,
        "ports": [_opened("control", port, "control")],
    }
    workload = {
        "replicas": 1,
        "serviceName": name,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [state],
    }
    return [
        _topology_map(topology, text, COORDINATOR),
        _object("v1", "Service", name, labels, service),
        _object("apps/v1", "StatefulSet", name, labels, workload),
    ]


def site_objects(topology: Topology, site: Site, text: str, wishes: Wishes) -> list[Object]:
    """Return a site's objects; `text` is the topology's file.

    Raises:
        ConfigError: it cannot be deployed so.
    """
    check(topology)
    name, labels = name_of(topology, site.name), _labels(topology, site.name)
    ports = site.ports
    if ports is None or len(ports) > TCP_PORTS:
        raise ConfigError(
            f"sites.{site.name}.wan.ports: want a range of at most {TCP_PORTS}, as 29500-29503: "
            "its Service opens them"
        )
    if site.nodes > 1 and not site.hosts:
        raise ConfigError(
            f"sites.{site.name}.hosts: want one a node: the addresses of their Services' load "
            "balancers"
        )
    opened = [(f"wan-{port}", port) for port in range(ports.first, ports.last + 1)]
    volume = _claim(wishes.storage, "ReadWriteOnce" if site.nodes == 1 else "ReadWriteMany")
    inside = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    jobset = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": 10},
        "replicatedJobs": [
            {
                "name": NODE_JOB,
                "replicas": 1,
                "template": {"spec": _job(topology, site, opened, wishes)},
            }
        ],
    }
    return [
        _topology_map(topology, text, site.name),
        _object("v1", "PersistentVolumeClaim", f"{name}-state", labels, volume),
        _object("v1", "Service", name, labels, inside),
        *(_wan_service(topology, site, node, opened) for node in range(site.nodes)),
        *_workload(name, labels, jobset, site.nodes, wishes),
    ]


def _workload(
    name: str, labels: dict[str, str], jobset: Object, num_nodes: int, wishes: Wishes
) -> list[Object]:
    """Return what runs a site's pods: a JobSet, or a TrainJob that makes the same one.

    The runtime names no framework, so Kubeflow gives pods no environment for torchrun: the agent
    starts that with its own.
    """
    queued = {**labels, QUEUE_LABEL: wishes.queue} if wishes.queue else labels
    if not wishes.is_train_job:
        return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, queued, jobset)]
    (replicated,) = jobset["replicatedJobs"]
    labelled = {**replicated["template"], "metadata": {"labels": {STEP_LABEL: "trainer"}}}
    template = {**jobset, "replicatedJobs": [{**replicated, "template": labelled}]}
    runtime = {"mlPolicy": {"numNodes": num_nodes}, "template": {"spec": template}}
    ref = {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": name}
    job = {"runtimeRef": ref, "trainer": {"numNodes": num_nodes}}
    return [
        _object(f"{TRAINER}/v1alpha1", "TrainingRuntime", name, labels, runtime),
        _object(f"{TRAINER}/v1alpha1", "TrainJob", name, queued, job),
    ]


def secret_of(topology: Topology, party: str) -> tuple[str, list[str]]:
    """Return the name of a party's Secret, and the files of certificates and keys that it needs."""
    return f"{name_of(topology, party)}-certs", files_of(party)


def check(topology: Topology) -> None:
    """Refuse what cannot be deployed.

    Raises:
        ConfigError: there is no TLS, an emulated WAN, or two names that Kubernetes sees as one.
    """
    if topology.security.tls_files is None:
        raise ConfigError("security: pods speak to other machines, so it takes `mode: mtls`")
    if topology.emulate:
        raise ConfigError("emulate: a WAN between clusters is a real one: `emulate: false`")
    names = [name_of(topology, each) for each in (COORDINATOR, *(s.name for s in topology.sites))]
    if twice := {each for each in names if names.count(each) > 1}:
        raise ConfigError(f"sites: Kubernetes would take two names for one: {', '.join(twice)}")


def name_of(topology: Topology, party: str) -> str:
    """Return the name of a party's objects: a label as DNS has it, with room for what follows."""
    words = f"{topology.name}-{party}".lower()
    label = re.sub(r"[^a-z0-9-]+", "-", words).strip("-")
    return f"isthmus-{label}"[:40].rstrip("-")


def _wan_service(
    topology: Topology, site: Site, node: int, opened: Sequence[tuple[str, int]]
) -> Object:
    """Return the Service by which other sites dial one node's gateways."""
    labels = _labels(topology, site.name)
    is_only = site.nodes == 1
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": labels if is_only else {**labels, INDEX_LABEL: str(node)},
        "ports": [_opened(each, port, port) for each, port in opened],
    }
    name = f"{name_of(topology, site.name)}-wan"
    return _object("v1", "Service", name if is_only else f"{name}-{node}", labels, spec)


def _opened(name: str, port: int, target: int | str) -> Object:
    """Return a port of a Service; older servers apply none that leaves its protocol out."""
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def _pods(topology: Topology, site: Site) -> list[str]:
    """Return host:port of a site's pods, as the JobSet names them in its headless Service."""
    name = name_of(topology, site.name)
    return [f"{name}-{NODE_JOB}-0-{node}.{name}:{NODE_PORT}" for node in range(site.nodes)]


def _job(
    topology: Topology, site: Site, opened: Sequence[tuple[str, int]], wishes: Wishes
) -> Object:
    num_ranks = site.accelerators_per_node
    agent = [
        *("agent", "--site", site.name, "--coordinator", wishes.coordinator),
        *("--topology", f"{FILES}/{TOPOLOGY}", "--state", AGENT_STATE),
        *("--bind", site.bind or ANY),
        *_overrides(wishes),
    ]
    # It is there once the agent has joined, and goes with the pod.
    joined = ["test", "-e", f"{AGENT_STATE}/agent-{site.name}.json"]
    ports = [*opened]
    runs: Object = {"args": agent}
    if site.nodes > 1:
        ports.append((NODE_JOB, NODE_PORT))
        agent += [word for pod in _pods(topology, site) for word in ("--node", pod)]
        runs = {
            "command": _by_index(["exec", "isthmus", *agent], ["exec", *serve_command(site.name)]),
        }
        joined = _by_index(joined, ["true"])
    resources: Object = {
        "requests": {
            "cpu": str(wishes.cpus_per_rank * num_ranks),
            "memory": _times(wishes.memory_per_rank, num_ranks),
        },
        "limits": {"memory": _times(wishes.memory_per_rank, num_ranks)},
    }
    if resource := _resource(site, wishes):
        for kind in resources.values():
            kind[resource] = str(num_ranks)
    common = _container(AGENT, wishes.image)
    container = {
        **common,
        **runs,
        "env": [*common["env"], {"name": SAVE_WITHIN, "value": f"{SAVE_S:g}"}],
        "ports": [{"name": each, "containerPort": port, "protocol": "TCP"} for each, port in ports],
        "readinessProbe": {"exec": {"command": joined}, "periodSeconds": 5},
        "resources": resources,
    }
    pod = _pod(topology, site.name, [container], wishes.image)
    pod["restartPolicy"] = "OnFailure"
    pod["volumes"].append(
        {
            "name": "state",
            "persistentVolumeClaim": {"claimName": f"{name_of(topology, site.name)}-state"},
        }
    )
    return {
        "completionMode": "Indexed",
        "parallelism": site.nodes,
        "completions": site.nodes,
        "backoffLimit": 100,
        "template": {"metadata": {"labels": _labels(topology, site.name)}, "spec": pod},
    }


def _by_index(first: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return a command that is one thing in pod 0, and another one in the others."""
    script = f'if [ "${INDEX}" = 0 ]; then {shlex.join(first)}; else {shlex.join(other)}; fi'
    return ["sh", "-c", script]


def _pod(topology: Topology, party: str, containers: list[Object], image: str) -> Object:
    secret, _ = secret_of(topology, party)
    # A key has to be its reader's alone, and a mounted Secret is a group's, behind links.
    copy = {
        **_container("certificates", image),
        "command": ["sh", "-c", f"umask 077 && cp -L {GIVEN}/* {CERTS}/"],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "volumeMounts": [
            {"name": "certs-given", "mountPath": GIVEN, "readOnly": True},
            {"name": "certs", "mountPath": CERTS},
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(SAVE_S + LEAVE_S),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [copy],
        "containers": containers,
        "volumes": [
            {"name": "topology", "configMap": {"name": f"{name_of(topology, party)}-topology"}},
            {"name": "certs-given", "secret": {"secretName": secret}},
            {"name": "certs", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(name: str, image: str) -> Object:
    """Return what all containers have in common."""
    return {
        "name": name,
        "image": image,
        "env": [
            *(
                {"name": variable, "value": f"{CERTS}/{CERTIFICATES[key]}"}
                for key, variable in TLS_VARIABLES.items()
            ),
            {"name": "HOME", "value": STATE},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "topology", "mountPath": FILES, "readOnly": True},
            {"name": "certs", "mountPath": CERTS},
            {"name": "state", "mountPath": STATE},
            {"name": "tmp", "mountPath": TMP},
            {"name": "shm", "mountPath": SHARED_MEMORY},
        ],
    }


def _topology_map(topology: Topology, text: str, party: str) -> Object:
    name = f"{name_of(topology, party)}-topology"
    made = _object("v1", "ConfigMap", name, _labels(topology, party), None)
    return {**made, "data": {TOPOLOGY: text}}


def _object(
    version: str, kind: str, name: str, labels: dict[str, str], spec: Object | None
) -> Object:
    made: Object = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
    }
    return made if spec is None else {**made, "spec": spec}


def _labels(topology: Topology, party: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "isthmus",
        "app.kubernetes.io/instance": name_of(topology, party),
    }


def _claim(size: str, mode: str) -> Object:
    return {"accessModes": [mode], "resources": {"requests": {"storage": size}}}


def _overrides(wishes: Wishes) -> Iterable[str]:
    # Kubernetes expands $(NAME) in arguments, and takes $$ for $.
    written = [override.replace("$", "$$") for override in wishes.overrides]
    return [word for override in written for word in ("--set", override)]


def _resource(site: Site, wishes: Wishes) -> str:
    if wishes.resource is not None:
        return wishes.resource
    name = site.accelerator.name
    known = (resource for start, resource in RESOURCES if name.startswith(start))
    return next(known, "nvidia.com/gpu")


def _times(quantity: str, count: int) -> str:
    """Return a multiple of a quantity, as `16Gi`."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", quantity)
    if found is None:
        raise ConfigError(f"{quantity!r}: want a quantity, as 16Gi")
    return f"{int(found[1]) * count}{found[2]}"


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
