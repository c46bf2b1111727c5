"""Modules that are compiled where isthmus is installed: which, where they lie, and why not.

They are Python files for Cython, in its pure Python mode, and lie where they belong. The backend
that builds isthmus (sites/compiling) compiles those that stand in MODULES into a folder of its own
for each kind of Python, below `isthmus/_compiled`, with a note of what it found. A package that has
such a module says in its `__init__`:

    __path__ = search_path(__name__, __path__)

Then what was compiled is found first. Where nothing could be compiled, or ISTHMUS_PLAIN is set, the
same files run as plain Python, slower. A file that changed after it was compiled is refused.

Only the standard library: the backend reads this before all else is there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MODULES: Final = ("sites.codecs.kernels.loops", "sites.gateway.wire.connection")
"""All of them, below `isthmus`. NAME.pxd beside NAME.py may have C types of it."""
VECTORISED: Final = ("sites.codecs.kernels.loops",)
"""Those of them that are compiled for processors with AVX2 and with AVX-512, too."""
PLAIN: Final = "ISTHMUS_PLAIN"
"""Variable: if set, installing compiles nothing, and nothing compiled is used."""
COMMON: Final = "common"
"""The folder of what every processor of this architecture can run."""
AVX2: Final = "avx2"
AVX512: Final = "avx512"
PACKAGE: Final = Path(__file__).parent.parent
NOT_INSTALLED: Final = "it was not installed for this Python"
_FLAGS: Final = {
    AVX512: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vbmi2"},
    AVX2: {"abm", "avx2", "bmi1", "bmi2", "f16c", "movbe"},
}
"""/proc/cpuinfo's words for x86-64-v4 and -v3, but for FMA, which has other bits and is not used.
The last of AVX-512 is not used either: what has it does not clock down for such vectors."""


class StaleError(ImportError):
    """A file changed after it was compiled: this is a checkout, not installed again since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What the backend has made."""

    digest: str
    """`digest_of` the files that it saw."""
    compiler: str
    """The compiler's name and version; empty: none works."""
    lacks: str
    """Why nothing was compiled; empty: all was."""

    def write(self, folder: Path) -> None:
        """Leave a note for `built`."""
        (folder / "build.json").write_text(json.dumps(asdict(self), indent=1))


def folder_below(package: Path) -> Path:
    """Return the folder of what is compiled for this Python; `package` is that of `isthmus`."""
    return package / "_compiled" / str(sysconfig.get_config_var("SOABI"))


def sources_below(package: Path) -> list[Path]:
    """Return the files that are compiled, and those with their C types."""
    files = [package.joinpath(*name.split(".")) for name in MODULES]
    typed = [file.with_suffix(".pxd") for file in files]
    return [file.with_suffix(".py") for file in files] + [file for file in typed if file.exists()]


def digest_of(package: Path) -> str:
    """Return a digest of all sources, with their names."""
    digest = hashlib.sha256()
    for file in sources_below(package):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@functools.cache
def built() -> Build | None:
    """Return what was made for this Python; None: nothing.

    Raises:
        StaleError: a file changed since.
    """
    try:
        note = (folder_below(PACKAGE) / "build.json").read_text()
    except FileNotFoundError:
        return None
    build = Build(**json.loads(note))
    if build.digest != digest_of(PACKAGE):
        raise StaleError(
            f"files in {PACKAGE} changed after they were compiled. `pip install -e .` compiles "
            "them again; scripts/test, scripts/demo and pytest do that by themselves"
        )
    return build


def why_plain() -> str | None:
    """Return why the files run as plain Python in this process; None: they are compiled.

    Raises:
        StaleError: as `built`.
    """
    if os.environ.get(PLAIN):
        return f"{PLAIN} is set"
    build = built()
    return NOT_INSTALLED if build is None else build.lacks or None


def note_of_plain() -> str | None:
    """Return a line that says how slowly this process runs, why, and the cure; None: it does not.

    Raises:
        StaleError: as `built`.
    """
    lacks = why_plain()
    if lacks is None:
        return None
    return (
        f"isthmus runs as plain Python, a hundred times more slowly, for {lacks}: install gcc (or "
        f"clang) and Python's headers, then isthmus again, without {PLAIN}"
    )


def search_path(package: str, own: Iterable[str]) -> list[str]:
    """Return the `__path__` of a package with compiled modules: where these are comes first.

    Args:
        package: its name.
        own: its `__path__`.

    Raises:
        StaleError: as `built`.
    """
    if why_plain() is None:
        folder, below = folder_below(PACKAGE), package.split(".")[1:]
        return [*(str(folder.joinpath(kind, *below)) for kind in kinds()), *own]
    if importlib.util.find_spec("cython") is None:
        _provide_cython()
    return [*own]


def _provide_cython() -> None:
    """Have `import cython` find what plain modules need of it, though Cython is not installed."""
    file = folder_below(PACKAGE) / "cython.py"
    if not file.exists():
        raise ImportError(f"isthmus: {NOT_INSTALLED}")
    spec = importlib.util.spec_from_file_location("cython", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cython"] = module
    spec.loader.exec_module(module)


@functools.cache
def kinds() -> tuple[str, ...]:
    """Return the folders of what this processor can run, the fastest first."""
    if platform.machine() != "x86_64":
        return (COMMON,)
    try:
        with Path("/proc/cpuinfo").open() as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return (COMMON,)
    flags = set(line.split())
    has_avx2 = flags >= _FLAGS[AVX2]
    return (*(kind for kind in _FLAGS if has_avx2 and flags >= _FLAGS[kind]), COMMON)


def main() -> int:
    """Say what was compiled, by what; return 1 if isthmus has to be installed again.

    scripts/environment.py asks.
    """
    try:
        note, build = note_of_plain(), built()
    except StaleError as error:
        print(error)  # noqa: T201 - the command's answer
        return 1
    print(note or f"isthmus is compiled, with {build.compiler if build else ''}")  # noqa: T201
    return int(build is None and not os.environ.get(PLAIN))
