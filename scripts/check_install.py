"""Check that isthmus can be installed from the package index alone, with each Python it is for.

Usage: scripts/check_install.py [--project DIR] [--index URL] [--release]

It resolves all extras of pyproject.toml together with constraints.txt, as a stranger's machine
would: without any mirror, folder of wheels or configuration of this one, by wheels alone, from what
the index says of them. Nothing is installed. What resolves with all extras does with fewer.

With --release it also builds the wheel and the source distribution, installs each into a fresh
environment, and runs it: minutes, for both compile.

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
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
UV = str(Path(sys.executable).with_name("uv"))
UNSOLVABLE = 1
"""uv's exit status where nothing fits together; every other means that it could not find out."""


RELEASED = "import isthmus; assert isthmus.__version__ == {!r}, isthmus.__version__"


class NoIndexError(Exception):
    """The package index cannot be reached, or does not answer as it should."""


def main() -> int:
    """Resolve for each Python; return 1 if that fails for any."""
    parser = argparse.ArgumentParser(description="Check that isthmus can be installed by anybody.")
    parser.add_argument("--project", type=Path, default=ROOT, help="the folder of pyproject.toml")
    parser.add_argument("--index", help="another index than uv's own")
    parser.add_argument("--release", action="store_true", help="build, install and run it, too")
    options = parser.parse_args()
    index = ["--default-index", options.index] if options.index else []
    problems = []
    try:
        with tempfile.TemporaryDirectory(prefix="isthmus-check-") as cache:
            for python in PYTHONS:
                problem = resolve(options.project, python, [*index, "--cache-dir", cache])
                print(f"Python {python}: {problem or 'can be installed'}", flush=True)
                problems += [problem] if problem else []
            if options.release:
                problem = release(options.project, [*index, "--cache-dir", cache])
                print(f"wheel and sdist: {problem or 'can be installed, and run'}", flush=True)
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
    done = subprocess.run(
        [
            *(UV, "pip", "compile", "--quiet", "--no-config", "--no-python-downloads", *options),
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


def release(project: Path, options: list[str]) -> str | None:
    """Return why wheel or source distribution cannot be built, installed or run; None: they can."""
    version = tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"]
    uv = ["--quiet", "--no-config", "--no-python-downloads", *options]
    with tempfile.TemporaryDirectory(prefix="isthmus-release-") as name:
        folder = Path(name)
        build = [UV, "build", *uv, "--python", sys.executable, "-o", str(folder), str(project)]
        if problem := failed(build, folder):
            return problem
        for built in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
            own = folder / built.name.removesuffix(".whl").removesuffix(".tar.gz") / "bin"
            for command in (
                [UV, "venv", *uv, "--python", sys.executable, str(own.parent)],
                [UV, "pip", "install", *uv, "--python", str(own / "python"), str(built)],
                [str(own / "isthmus"), "explain", "SITE_LOST"],
                [str(own / "python"), "-c", RELEASED.format(version)],
            ):
                if problem := failed(command, folder):
                    return f"{built.name}: {problem}"
    return None


def failed(command: list[str], folder: Path) -> str | None:
    """Run a command in a folder; return what it said if it failed."""
    env = strangers_environment()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return f"{' '.join(command)}\n{done.stderr}" if done.returncode else None


def strangers_environment() -> dict[str, str]:
    """Return this process's environment without what tells an installer where to look."""
    settings = ("PIP_", "UV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    if certificates := os.environ.get("PIP_CERT"):  # how the network is reached, not what is there
        kept.setdefault("SSL_CERT_FILE", certificates)
    return kept


if __name__ == "__main__":
    sys.exit(main())
