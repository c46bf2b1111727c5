"""Converts a plan's decisions to overrides of a job."""

from __future__ import annotations

import json
from typing import Any

NUM_TOLD_ALTERNATIVES = 10
"""Number of the best alternatives that `isthmus plan` prints and a run keeps."""
JOB_PATHS = {
    "placement": "placement",
    "reduction": "reduction",
    "micro_batch": "trainer.micro_batch",
    "regime": "regime",
    **{
        f"exchange.{key}": f"exchange.{key}"
        for key in ("codec", "codecs", "chunk", "bucket", "channels_per_link")
    },
}
"""The path in a job of each decision."""


def overrides_of(decisions: dict[str, Any]) -> list[str]:
    """Return a plan file's decisions as overrides of a job (`path=value`)."""
    overrides = []
    for path, in_job in JOB_PATHS.items():
        value: Any = decisions
        for key in path.split("."):
            value = value.get(key)
        if value is None:
            continue
        # In JSON, unlike YAML, a text cannot be mistaken for another type.
        overrides.append(f"{in_job}={json.dumps(value, ensure_ascii=False)}")
    return overrides
