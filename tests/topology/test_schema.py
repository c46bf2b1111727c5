"""The JSON Schemas say the same as the models."""

import json
from pathlib import Path

import pytest

from isthmus.topology.schemas.schema import SCHEMAS, schema, schema_text, write_schemas


def test_every_schema_is_written_where_isthmus_is_built(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert written == {f"{kind}.schema.json": schema(kind) for kind in SCHEMAS}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_unknown_keys_are_refused_everywhere(kind: str) -> None:
    for described in [schema(kind), *schema(kind)["$defs"].values()]:
        assert described["additionalProperties"] is False


def test_a_schema_speaks_the_files_language() -> None:
    link = schema("topology")["$defs"]["LinkModel"]
    assert link["required"] == ["between"]
    assert link["properties"]["rtt"]["pattern"].endswith("(ns|us|ms|s|min|h)$")
    assert link["properties"]["jitter"]["default"] == "0s"
    period = schema("topology")["$defs"]["PeriodModel"]
    assert set(period["properties"]) == {"from", "to", "share"}
    assert schema("job")["$defs"]["ExchangeModel"]["properties"]["chunk"]["default"] == "2MiB"
    assert "null" not in schema_text("topology") + schema_text("job")
