"""The project's own virtual environment: made on first use, and again when its inputs change.

Only the standard library, for it runs before anything is installed.

uv installs. It knows the sizes of what it will download before it does, and where PyTorch keeps its
CPU build, a tenth of what PyPI's comes to with CUDA. The settings that pip has on this machine,
mirrors and folders of wheels, hold for it, too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
NVIDIA = Path("/proc/driver/nvidia/version")
_STAMP = VENV / "isthmus-inputs.sha256"
_LOCK = VENV / "pylock.toml"
"""All that is to be installed, with its sizes."""
_BACKEND = ROOT / "sites" / "compiling" / "build_backend.py"
_INPUTS = (ROOT / "pyproject.toml", _BACKEND, CONSTRAINTS)
_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
"""Settings of pip that say where it looks and what it takes, and uv's words for them."""
_VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
"""Those that uv reads from its environment."""
_STATE = "import sys; from isthmus.sites.compiled import main; sys.exit(main())"
_NAMED = 3
"""The packages that are named before the download: the largest."""


def ensure(*groups: str) -> None:
    """Make .venv hold what pyproject.toml and constraints.txt say; a second call costs little.

    isthmus's own modules are compiled again if they have changed. `groups` are of the optional
    dependencies in pyproject.toml; what is there stays.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever starts this may have an older one
        raise SystemExit(f"isthmus needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    import tomllib  # new in 3.11

    digest, *installed = _STAMP.read_text().split() if _STAMP.exists() else [""]
    there = {*installed, "train"} if "dev" in installed else {*installed}
    if PYTHON.exists() and digest == _digest() and there.issuperset(groups):
        ensure_compiled()
        return
    wanted = sorted({*groups, *installed})
    _say(f"setting up {VENV}")
    if not PYTHON.exists():
        _run([sys.executable, "-m", "venv", str(VENV)])
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "-c", str(CONSTRAINTS), "uv"])
    options, variables = _pips_settings(PYTHON)
    uv = [tool("uv"), "pip"]
    python = ["--python", str(PYTHON), "--no-python-downloads"]
    extra = [word for group in wanted for word in ("--extra", group)]
    compiled = [*uv, "compile", "--quiet", *python, *options, *extra, "-c", str(CONSTRAINTS)]
    compiled += ["--format", "pylock.toml", "-o", str(_LOCK), str(ROOT / "pyproject.toml")]
    _LOCK.unlink(missing_ok=True)  # what stands there would be preferred
    if not _compiled_for_cpu(compiled, variables):
        _run(compiled, variables)
    _say(_download(tomllib.loads(_LOCK.read_text()), _there(uv)))
    _run([*uv, "install", "--preview-features", "pylock", *python, "-r", str(_LOCK)], variables)
    _install_own(PYTHON)
    _STAMP.write_text("\n".join([_digest(), *wanted]))


def tool(name: str) -> str:
    """Return the path of a command installed in the environment."""
    return str(VENV / "bin" / name)


def ensure_compiled(python: Path = PYTHON) -> str:
    """Compile isthmus's own modules again if they have changed; return what with, or why not."""
    state = [str(python), "-P", "-c", _STATE]
    done = subprocess.run(state, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    _say("compiling isthmus")
    _install_own(python)
    return _output(state).strip()


def _install_own(python: Path) -> None:
    """Install isthmus itself from this checkout: its backend compiles.

    Where there is no compiler, and none to be had, it is installed all the same.
    """
    options, variables = _pips_settings(python)
    uv = [str(python.with_name("uv")), "pip", "install", "--quiet", "--python", str(python)]
    own = [*uv, *options, "--build-constraints", str(CONSTRAINTS), "--no-deps"]
    own += ["--reinstall-package", "isthmus", "-e", str(ROOT)]
    env = _environment(variables)
    done = subprocess.run(own, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0 and "ziglang" in done.stderr:
        _run(own, variables | {"ISTHMUS_PLAIN": "1"})
    elif done.returncode != 0:
        raise SystemExit(f"set-up failed: {' '.join(own)}\n{done.stderr}")


def _pips_settings(python: Path) -> tuple[list[str], dict[str, str]]:
    """Return pip's settings on this machine as options and variables of uv."""
    listed = [str(python), "-m", "pip", "--disable-pip-version-check", "config", "list"]
    return _as_uv_has_it(_output(listed))


def _as_uv_has_it(listed: str) -> tuple[list[str], dict[str, str]]:
    """Return pip's settings, as `pip config list` prints them, as options and variables of uv.

    The list is sorted. In pip an environment variable wins over a file.
    """
    settings: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    options = [
        word
        for name, option in _OPTIONS.items()
        for value in settings.get(name, "").split()
        for word in (option, value)
    ]
    if "extra-index-url" in settings:
        options += ["--index-strategy", "unsafe-best-match"]  # as pip does
    return options, {
        variable: settings[name] for name, variable in _VARIABLES.items() if name in settings
    }


def _compiled_for_cpu(compiled: list[str], variables: dict[str, str]) -> bool:
    """Choose PyTorch's CPU build where there is no GPU, and its index answers."""
    if NVIDIA.exists():
        return False
    done = subprocess.run(
        [*compiled, "--torch-backend", "cpu"],
        env=_environment(variables | {"UV_HTTP_RETRIES": "1"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        why = (
            (done.stderr.strip() or "it was killed")
            .splitlines()[-1]
            .strip()
            .removeprefix("cause: ")
        )
        _say(f"there is no GPU, but PyTorch's smaller build for CPUs cannot be had ({why})")
    return done.returncode == 0


def _download(lock: dict[str, Any], there: dict[str, str]) -> str:
    """Return what will be installed, and how much of it is downloaded.

    `there` are the versions of packages that are there already.
    """
    sizes = {
        f"{package['name']} {package['version']}": _bytes(package)
        for package in lock["packages"]
        if there.get(package["name"]) != package["version"]
    }
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{name} {_megabytes(sizes[name])}" for name in largest if sizes[name])
    told = f"installing {len(sizes)} packages; to download: up to {_megabytes(sum(sizes.values()))}"
    return f"{told}, most of it {named}" if named else told


def _bytes(package: dict[str, Any]) -> int:
    """Return the size of a package's wheel; 0 where it lies on this machine's disk.

    Several may fit; the largest counts.
    """
    wheels = package.get("wheels") or [package.get("sdist", {})]
    return max(int(wheel.get("size", 0)) for wheel in wheels)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def _there(uv: list[str]) -> dict[str, str]:
    listed = json.loads(_output([*uv, "list", "--format", "json", "--python", str(PYTHON)]))
    return {package["name"]: package["version"] for package in listed}


def _digest() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in _INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a step; what the user has set for uv wins over pip's settings."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return variables | own


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    _require(command, done.returncode)
    return done.stdout


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    """Run a step of the set-up; its output goes to stderr, a failure ends the script."""
    env = _environment(variables or {})
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=sys.stderr, check=False)
    _require(command, done.returncode)


def _require(command: list[str], returncode: int) -> None:
    if returncode != 0:
        raise SystemExit(f"set-up failed: {' '.join(command)}")
