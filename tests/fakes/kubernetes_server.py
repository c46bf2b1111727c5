"""A real Kubernetes API server on this machine, by tests/tools/kubernetes_here.py."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools import kubernetes_here
from tests.tools.daemons import held

JOBSET_CRD = Path(__file__).with_name("jobset-v0.9.1.crd.json.gz")
"""JobSet's own, config/components/crd/bases of its v0.9.1, without descriptions and empty defaults.
(Apache License 2.0, The Kubernetes Authors.)"""


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
    if missing := kubernetes_here.missing_programs():
        pytest.skip(missing)
    with held("tests.tools.kubernetes_here", str(folder), str(JOBSET_CRD)):
        yield folder / "kubeconfig"
