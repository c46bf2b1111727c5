#!/usr/bin/env python3
"""Train a job in one process: the losses that a run over several sites must reproduce.

Usage: python scripts/reference_training.py JOB [--set PATH=VALUE]...
Writes one JSON object a step to stdout.
"""

import argparse
import json
import sys
from pathlib import Path

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.errors import ConfigError


def main() -> int:
    """Return the exit status: 2 when the job is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    arguments = parser.parse_args()
    try:
        text = arguments.job.read_text(encoding="utf-8")
        job = load_job(text, str(arguments.job), arguments.set)
        train_alone(
            job,
            arguments.job.parent,
            lambda step, loss: print(json.dumps({"step": step + 1, "loss": loss}), flush=True),
        )
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
