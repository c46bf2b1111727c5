"""JSON Schemas of all documents, for editors, generated from the models."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from isthmus.topology.faults.script import FaultScript
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Topology
from isthmus.topology.spec.yaml_models import model_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: dict[str, type[BaseModel]] = {
    "topology": model_of(Topology),
    "job": model_of(Job),
    "faults": model_of(FaultScript),
}
"""The models that check documents, by document kind."""


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a `topology`, `job` or `faults` document, as a new dict."""
    generated = _without_null(SCHEMAS[kind].model_json_schema(by_alias=True))
    return {"$schema": DIALECT, **generated, "title": f"isthmus {kind}"}


def schema_text(kind: str) -> str:
    """Return the schema as its file holds it."""
    return json.dumps(schema(kind), indent=2, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> None:
    """Write every schema into a folder."""
    for kind in SCHEMAS:
        path = folder / f"{kind}.schema.json"
        path.write_text(schema_text(kind), encoding="utf-8")


def _without_null(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the schema without its nulls: an absent key is left out, never written as nothing."""
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_null(item) for key, item in value.items() if item is not None}
    choices = kept.get("anyOf", [])
    if {"type": "null"} in choices:
        choices.remove({"type": "null"})
        if len(choices) == 1:
            del kept["anyOf"]
            kept = {**choices[0], **kept}
    # pydantic's titles (attribute and class names) do not help a reader.
    if isinstance(kept.get("title"), str):
        del kept["title"]
    return kept
