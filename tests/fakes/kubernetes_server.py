"""A real Kubernetes API server on this machine, by scripts/kubernetes_here."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kubernetes_here"
SERVER = Path.home() / ".cache" / "isthmus" / "kubernetes" / "kube-apiserver"
JOBSET_CRD = Path(__file__).with_name("jobset-v0.9.1.crd.json.gz")
"""JobSet's own, config/components/crd/bases of its v0.9.1, without descriptions and empty defaults.
(Apache License 2.0, The Kubernetes Authors.)"""
STOP_S = 60.0


def jobset_schema() -> dict[str, Any]:
    """Return the schema of JobSet's CRD, which lets in no field that it does not name."""
    crd = json.loads(gzip.decompress(JOBSET_CRD.read_bytes()))
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    closed: dict[str, Any] = _closed(schema)
    return closed


def _closed(schema: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in made or "x-kubernetes-preserve-unknown-fields" in made
    return (
        made
        if is_open or made.get("type") != "object"
        else {
            **made,
            "additionalProperties": False,
        }
    )


@contextmanager
def kubernetes_server(folder: Path) -> Iterator[Path]:
    """Run one that knows JobSets; yield its kubeconfig. Skip the test where it was not built.

    It ends with the block, and with this process.
    """
    if not SERVER.is_file():
        pytest.skip(f"{SERVER} is not there: scripts/kubernetes_here build (takes half an hour)")
    if missing := [each for each in ("etcd", "openssl") if shutil.which(each) is None]:
        pytest.skip(f"{', '.join(missing)}: not here; apt-get install etcd-server openssl")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "hold", str(folder), str(JOBSET_CRD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("export KUBECONFIG="), "see what it says above"
        yield Path(line.partition("=")[2].strip())
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(STOP_S)
