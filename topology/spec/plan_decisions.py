"""What a plan decides, put into a job as overrides."""

from __future__ import annotations

import json
from typing import Any

JOB_PATHS = {
    "placement": "placement",
    "reduction": "reduction",
    "micro_batch": "trainer.micro_batch",
    **{
        f"exchange.{key}": f"exchange.{key}"
        for key in ("codec", "codecs", "chunk", "bucket", "channels_per_link")
    },
}
"""The path in a job of each decision."""


def overrides_of(decisions: dict[str, Any]) -> list[str]:
    """Return decisions as a plan file has them as overrides of a job: `path=value` each."""
    found = []
    for path, in_job in JOB_PATHS.items():
        value: Any = decisions
        for key in path.split("."):
            value = value.get(key)
        if value is None:
            continue
        # JSON is YAML in which a text cannot be taken for anything else.
        found.append(f"{in_job}={json.dumps(value, ensure_ascii=False)}")
    return found
