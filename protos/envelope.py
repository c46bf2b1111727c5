"""The one JSON object that a command with --json prints on stdout."""

import json
import math
from collections.abc import Mapping
from typing import Any

from isthmus.protos.catalogue import CATALOGUE

SCHEMA_VERSION = 1


def success(command: str, data: Any, exit_code: int = 0) -> str:  # noqa: ANN401 - any JSON value
    """Return the envelope of a command that succeeded."""
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "status": "ok",
            "exit_code": exit_code,
            "data": data,
        }
    )


def failure(
    command: str,
    code: str,
    message: str,
    where: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
    exit_code: int | None = None,
) -> str:
    """Return the envelope of an error; hint and exit status come from the catalogue."""
    entry = CATALOGUE[code]
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "status": "error",
            "exit_code": int(entry.exit_code if exit_code is None else exit_code),
            "error": {
                "code": code,
                "message": message,
                "hint": entry.hint,
                "page": entry.page,
                "where": where,
            },
        }
    )


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return `value` with None for NaN and infinity, which JSON lacks: a loss may be NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
    return value
