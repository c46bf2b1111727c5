"""The committed JSON Schemas are current, and say the same as the models."""

import pytest

from isthmus.topology.presets.templates import SCHEMA_FOLDER
from isthmus.topology.schemas.schema import SCHEMAS, schema, schema_text


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_committed_schema_is_current(kind: str) -> None:
    committed = (SCHEMA_FOLDER / f"{kind}.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(kind), "run scripts/gen_schemas.py"


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
    assert schema("job")["$defs"]["ExchangeModel"]["properties"]["chunk"]["default"] == "1MiB"
    assert "null" not in schema_text("topology") + schema_text("job")
