"""Check that isthmus can be installed from the package index alone, with each Python it is for.

Usage: scripts/check_install.py [--project DIR] [--index URL]

It resolves all extras of pyproject.toml together with constraints.txt, as a stranger's machine
would: without any mirror, folder of wheels or configuration of this one, by wheels alone, from what
the index says of them. Nothing is installed. What resolves with all extras does with fewer.

It takes seconds: uv reads a wheel's metadata by itself, where pip may download gigabytes, and knows
of other Pythons which dependencies they have (`python_version < "3.12"`); pip takes those of the
Python that it runs with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
UNSOLVABLE = 1
"""uv's exit status where nothing fits together; every other means that it could not find out."""


class NoIndexError(Exception):
    """The package index cannot be reached, or does not answer as it should."""


def main() -> int:
    """Resolve for each Python; return 1 if that fails for any."""
    parser = argparse.ArgumentParser(description="Check that isthmus can be installed by anybody.")
    parser.add_argument("--project", type=Path, default=ROOT, help="the folder of pyproject.toml")
    parser.add_argument("--index", help="another index than uv's own")
    options = parser.parse_args()
    index = ["--default-index", options.index] if options.index else []
    problems = []
    try:
        with tempfile.TemporaryDirectory(prefix="isthmus-check-") as cache:
            for python in PYTHONS:
                problem = resolve(options.project, python, [*index, "--cache-dir", cache])
                print(f"Python {python}: {problem or 'can be installed'}", flush=True)
                problems += [problem] if problem else []
    except NoIndexError as error:
        print(f"nothing could be checked, for the package index does not answer: {error}")
        return 1
    return 1 if problems else 0


def resolve(project: Path, python: str, options: list[str]) -> str | None:
    """Return why the project cannot be installed with a version of Python, if it cannot.

    Raises:
        NoIndexError: it cannot be known.
    """
    uv = str(Path(sys.executable).with_name("uv"))
    done = subprocess.run(
        [
            *(uv, "pip", "compile", "--quiet", "--no-config", "--no-python-downloads", *options),
            *("--python", sys.executable, "--python-version", python, "--only-binary", ":all:"),
            *("--all-extras", "-c", "constraints.txt", "pyproject.toml"),
        ],
        cwd=project,
        env=strangers_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    if done.returncode == UNSOLVABLE:
        return f"its dependencies do not fit together\n{done.stderr}"
    raise NoIndexError(done.stderr)


def strangers_environment() -> dict[str, str]:
    """Return this process's environment without what tells an installer where to look."""
    settings = ("PIP_", "UV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    if certificates := os.environ.get("PIP_CERT"):  # how the network is reached, not what is there
        kept.setdefault("SSL_CERT_FILE", certificates)
    return kept


if __name__ == "__main__":
    sys.exit(main())
