"""setuptools' backend, and besides it compiles what sites/compiled.py lists.

pyproject.toml names it, and the class that compiles. The first of these that can make a module for
this Python is taken: $CC, cc, gcc, clang; and where none can, the compiler in the package ziglang,
which is installed for it. Where that cannot either, the files stay what they are, Python, and a
note says why. $CFLAGS and $LDFLAGS count.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - a backend has all of its hooks
from setuptools.command.build_ext import build_ext

SOURCES = Path.cwd() / ".src"
"""Installers call a backend where pyproject.toml lies."""
sys.path.insert(0, str(SOURCES))

from isthmus.sites import compiled  # noqa: E402

ZIG = [sys.executable, "-m", "ziglang", "cc"]
FLAGS = [
    *("-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", "-fwrapv", "-DNDEBUG", "-w"),
    # The same bits everywhere: no product and sum at once. That no one asks whether an operation
    # trapped changes none, and lets it be one of a vector.
    *("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"),
]
AVX2 = ["-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt", "-mmovbe"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
VARIANTS = {
    # The first: what numpy's and PyTorch's wheels want, too.
    compiled.COMMON: (["-msse4.2", "-mpopcnt"], "x86_64_v2"),
    compiled.AVX2: (AVX2, "x86_64_v3"),
    compiled.AVX512: ([*AVX2, *AVX512, "-mprefer-vector-width=512"], "x86_64_v4"),
}
"""For x86-64 the flags of gcc and clang; and zig's name of such a processor, for it would compile
for the one that it runs on."""
Settings = Mapping[str, str | list[str] | None] | None
NONE_WORKS = "no C compiler works"
TRIAL = "#include <Python.h>\nint trial(void) { return Py_IsInitialized(); }\n"


class Compile(build_ext):  # type: ignore[misc] # without types
    """Translates modules to C by Cython, and compiles that."""

    def run(self) -> None:
        """Fill the folder `_compiled` anew."""
        package = SOURCES / "isthmus" if self.inplace else Path(self.build_lib, "isthmus")
        folder = compiled.folder_below(package)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as own:
            made = Path(own, folder.name)
            made.mkdir()
            compiler, lacks = find_compiler()
            if compiler:
                lacks = compile_all(compiler, made)
            note = compiled.Build(
                digest=compiled.digest_of(SOURCES / "isthmus"),
                compiler=version_of(compiler) if compiler else "",
                lacks=lacks,
            )
            note.write(made)
            import Cython.Shadow

            shutil.copy(Cython.Shadow.__file__, made / "cython.py")
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        print(f"not compiled: {lacks}" if lacks else f"compiled with {note.compiler}")

    def get_source_files(self) -> list[str]:
        """Name none: all are files of the package."""
        return []

    def get_outputs(self) -> list[str]:
        """Name none: a wheel takes the whole folder."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Name none: an editable installation has them in the sources' folder."""
        return {}


def find_compiler() -> tuple[list[str], str]:
    """Return the first compiler that works here, or none and the reason."""
    if os.environ.get(compiled.PLAIN):
        return [], f"{compiled.PLAIN} was set"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return [], f"{header} is missing"
    for command in candidates():
        if works(command):
            return command, ""
    return [], NONE_WORKS


def candidates() -> Iterator[list[str]]:
    """Yield the commands of compilers that are there."""
    if os.environ.get("CC"):
        yield shlex.split(os.environ["CC"])
    yield from ([name] for name in ("cc", "gcc", "clang") if shutil.which(name))
    if find_spec("ziglang") is not None:
        yield ZIG


def works(command: list[str]) -> bool:
    """Return whether a compiler makes a module for this Python."""
    with tempfile.TemporaryDirectory() as own:
        source = Path(own, "trial.c")
        source.write_text(TRIAL)
        try:
            return not compile_c(command, source, Path(own, "trial.so"), compiled.COMMON)
        except OSError:
            return False


def compile_c(command: list[str], source: Path, target: Path, variant: str) -> str:
    """Compile one file of C; return what is wrong."""
    flags: list[str] = []
    if command == ZIG:
        names = {"x86_64": VARIANTS[variant][1]}
        flags = [f"-mcpu={names.get(platform.machine(), 'baseline')}"]
    elif platform.machine() == "x86_64":
        flags = VARIANTS[variant][0]
    include = f"-I{sysconfig.get_path('include')}"
    own = [*shlex.split(os.environ.get("CFLAGS", "")), *shlex.split(os.environ.get("LDFLAGS", ""))]
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, *FLAGS, *flags, include, str(source), "-o", str(target), "-lm", *own],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def compile_all(command: list[str], folder: Path) -> str:
    """Compile every module for every kind of processor; return what is wrong.

    Raises:
        CalledProcessError: Cython refuses a module.
    """
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    all_kinds = VARIANTS if platform.machine() == "x86_64" else (compiled.COMMON,)

    def translate(name: str) -> Path:
        source = Path(own, f"{name}.c")
        cython = [sys.executable, "-m", "cython", "-3", "--module-name", f"isthmus.{name}"]
        file = Path("isthmus", *name.split(".")).with_suffix(".py")
        subprocess.run([*cython, "-o", str(source), str(file)], cwd=SOURCES, check=True)
        return source

    def make(source: Path, kind: str) -> str:
        place = Path(folder, kind, *source.stem.split("."))
        return compile_c(command, source, place.with_name(f"{place.name}{suffix}"), kind)

    with tempfile.TemporaryDirectory() as own, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(make, source, kind)
            for name, source in zip(
                compiled.MODULES, pool.map(translate, compiled.MODULES), strict=True
            )
            for kind in (all_kinds if name in compiled.VECTORISED else (compiled.COMMON,))
        ]
        problems = [job.result() for job in jobs if job.result()]
    if not problems:
        return ""
    print(problems[0], file=sys.stderr)
    for kind in all_kinds:
        shutil.rmtree(folder / kind, ignore_errors=True)
    return f"{command[0]} failed: {problems[0].splitlines()[-1]}"


def version_of(command: list[str]) -> str:
    """Return a compiler's name and version."""
    if command == ZIG:
        from importlib.metadata import version

        return f"zig {version('ziglang')}"
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [" ".join(command)])[0]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return what has to be installed to build a wheel: a compiler, if none works."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *required_compiler()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return what has to be installed to install this checkout."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *required_compiler()]


def required_compiler() -> list[str]:
    """Return the package that brings a compiler, unless one is here."""
    is_needed = find_spec("ziglang") is None and find_compiler()[1] == NONE_WORKS
    return ["ziglang>=0.13"] if is_needed else []
