"""The project's own virtual environment: made on first use, and again when its inputs change.

Only the standard library, for it runs before anything is installed.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
_STAMP = VENV / "isthmus-inputs.sha256"
_INPUTS = (ROOT / "pyproject.toml", ROOT / "constraints.txt")


def ensure(*extras: str) -> None:
    """Make .venv hold what pyproject.toml and constraints.txt say; a second call costs nothing.

    `extras` are further optional dependencies of pyproject.toml; what is there stays.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever starts this may have an older one
        raise SystemExit(f"isthmus needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    digest, *installed = _STAMP.read_text().split() if _STAMP.exists() else [""]
    if PYTHON.exists() and digest == _digest() and {"dev", *extras} <= {"dev", *installed}:
        return
    groups = ["dev", *sorted({*extras, *installed} - {"dev"})]
    print(f"setting up {VENV} (a few minutes the first time)", file=sys.stderr)
    if not PYTHON.exists():
        _run([sys.executable, "-m", "venv", str(VENV)])
    # torch first and by itself: asked for together with others, a bare requirement of one of them
    # could resolve it to a build with gigabytes of CUDA.
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    _run([*pip, *constraints, "torch"])
    _run([*pip, *constraints, "-e", f"{ROOT}[{','.join(groups)}]"])
    _STAMP.write_text("\n".join([_digest(), *groups]))


def tool(name: str) -> str:
    """Return the path of a command installed in the environment."""
    return str(VENV / "bin" / name)


def _digest() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in _INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str]) -> None:
    """Run a step of the set-up; its output goes to stderr, a failure ends the script."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SystemExit(f"set-up failed: {' '.join(command)}")
