"""The objects of a deployment on Kubernetes: a coordinator, and a JobSet for each site. Pure.

Each site is an own file, for each is likely to be an own cluster. No secret is rendered: who holds
the certificates makes a Secret of those that a party needs, `secret_of`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.launchers.keeper import END_S
from protos.identities import AGENT, COORDINATOR, GATEWAY
from protos.security import TLS_VARIABLES
from topology.errors import ConfigError
from topology.world import Site, Topology

FILES = "/etc/isthmus"
STATE = "/var/lib/isthmus"
TMP, SHARED_MEMORY = "/tmp", "/dev/shm"  # noqa: S108 - a pod's own
AGENT_STATE = f"{TMP}/agent"
ANY = "0.0.0.0"  # noqa: S104 - of a pod, and with TLS
GIVEN = "/run/certs-given"
CERTS = "/run/certs"
TOPOLOGY = "topology.yaml"
USER = 1000
"""User id in the containers; the image's Containerfile makes the same user."""
TCP_PORTS = 64
"""Ports of a site at most: its Service names each of them."""
NODE_JOB = "node"
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


def coordinator_objects(topology: Topology, text: str, wishes: Wishes) -> list[Object]:
    """Return the coordinator's objects; `text` is the topology's file.

    Raises:
        ConfigError: it cannot be deployed so.
    """
    check(topology)
    name = name_of(topology, COORDINATOR)
    port = topology.coordinator.port or _port_of(wishes.coordinator)
    labels = _labels(topology, COORDINATOR)
    answers = {"tcpSocket": {"port": "control"}}
    container = {
        **_container(COORDINATOR, wishes.image),
        "args": [
            *("coordinator", "--topology", f"{FILES}/{TOPOLOGY}"),
            *("--state", f"{STATE}/state", "--bind", f"{ANY}:{port}"),
            *_overrides(wishes),
        ],
        "ports": [{"name": "control", "containerPort": port}],
        "readinessProbe": {**answers, "periodSeconds": 5},
        "livenessProbe": {**answers, "periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
    }
    pod = _pod(topology, COORDINATOR, [container], wishes.image)
    state = {
        "metadata": {"name": "state"},
        "spec": _claim("10Gi"),
    }
    service = {
        "type": "LoadBalancer",
        "selector": labels,
        "ports": [{"name": "control", "port": port, "targetPort": "control"}],
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
    ports = site.listening.ports
    if ports is None or len(ports) > TCP_PORTS:
        raise ConfigError(
            f"sites.{site.name}.wan.ports: want a range of at most {TCP_PORTS}, as 29500-29503: "
            "its Service opens them"
        )
    if site.nodes > 1:
        raise ConfigError(
            f"sites.{site.name}.nodes: a site of several machines cannot be rendered yet: describe "
            "each as a site"
        )
    opened = [(f"wan-{port}", port) for port in range(ports.first, ports.last + 1)]
    wan = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": labels,
        "ports": [{"name": each, "port": port, "targetPort": port} for each, port in opened],
    }
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
        _object("v1", "PersistentVolumeClaim", f"{name}-state", labels, _claim(wishes.storage)),
        _object("v1", "Service", name, labels, inside),
        _object("v1", "Service", f"{name}-wan", labels, wan),
        _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, labels, jobset),
    ]


def secret_of(topology: Topology, party: str) -> tuple[str, list[str]]:
    """Return the name of a party's Secret, and the files of certificates and keys that it needs."""
    roles = [COORDINATOR] if party == COORDINATOR else [f"{party}.{AGENT}", f"{party}.{GATEWAY}"]
    files = ["ca.pem", *(f"{role}.{kind}" for role in roles for kind in ("pem", "key"))]
    return f"{name_of(topology, party)}-certs", files


def check(topology: Topology) -> None:
    """Refuse what cannot be deployed.

    Raises:
        ConfigError: there is no TLS, an emulated WAN, or two names that Kubernetes sees as one.
    """
    if topology.tls is None:
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


def _job(
    topology: Topology, site: Site, opened: Sequence[tuple[str, int]], wishes: Wishes
) -> Object:
    num_ranks = site.accelerators_per_node
    # It is there once the agent has joined, and goes with the pod.
    joined = ["test", "-e", f"{AGENT_STATE}/agent-{site.name}.json"]
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
    container = {
        **_container(AGENT, wishes.image),
        "args": [
            *("agent", "--site", site.name, "--coordinator", wishes.coordinator),
            *("--topology", f"{FILES}/{TOPOLOGY}", "--state", AGENT_STATE),
            *("--bind", site.listening.bind or ANY),
            *_overrides(wishes),
        ],
        "ports": [{"name": each, "containerPort": port} for each, port in opened],
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
        "terminationGracePeriodSeconds": math.ceil(END_S) + 5,
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
    places = {"ca": "ca.pem", "cert": "{name}.pem", "key": "{name}.key"}
    return {
        "name": name,
        "image": image,
        "env": [
            *(
                {"name": variable, "value": f"{CERTS}/{places[key]}"}
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


def _claim(size: str) -> Object:
    return {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}


def _overrides(wishes: Wishes) -> Iterable[str]:
    return [word for override in wishes.overrides for word in ("--set", override)]


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
