"""One import name, which hides nobody's modules and is hidden by none; code that fits all Pythons.

And what pyproject.toml and constraints.txt say can be installed, or scripts/check_install.py says
why not.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import isthmus
from isthmus.protos.own_processes import own_command
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.compiled import MODULES, PLAIN, folder_below, why_plain
from scripts import check_install

FOLDERS = ["orchestrator", "protos", "sites", "topology"]
ROOT = Path(__file__).parents[1]


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=["plain", "compiled"],
)
def is_plain(request: pytest.FixtureRequest) -> bool:
    """Whether nothing in the wheel is compiled: to set up this environment has compiled it all."""
    return bool(request.param)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, is_plain: bool) -> Path:
    """Build a wheel of the source distribution; return it. What is compiled is not optimised."""
    folder = tmp_path_factory.mktemp("dist")
    uv = [str(Path(sys.executable).with_name("uv")), "build", "--quiet", "--no-build-isolation"]
    subprocess.run(
        [*uv, "--python", sys.executable, "-o", str(folder), str(ROOT)],
        env={**os.environ, "CFLAGS": "-O0", PLAIN: "1" if is_plain else ""},
        check=True,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(built: Path) -> Path:
    """Return a folder that has the wheel's files, for PYTHONPATH."""
    folder = built.with_name("unpacked")
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.mark.slow
def test_a_wheel_brings_one_import_name_with_all_modules_and_files(
    built: Path, is_plain: bool
) -> None:
    with zipfile.ZipFile(built) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {f"isthmus/{name}" for name in tracked.stdout.split()}
    made = {name for name in names if name.startswith("isthmus/_compiled/")}
    expected |= {"isthmus/__init__.py", "isthmus/py.typed"}
    assert names - made == expected
    folder = f"isthmus/_compiled/{folder_below(ROOT).name}"
    assert {f"{folder}/build.json", f"{folder}/cython.py"} <= made
    if is_plain or why_plain() is None:
        wanted = set() if is_plain else {name.replace(".", "/") for name in MODULES}
        assert wanted == {
            name.removeprefix(f"{folder}/common/").partition(".")[0]
            for name in made
            if "/common/" in name
        }


def test_nothing_that_was_built_is_in_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.so", "*.c", "*.pyc"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() == ["scripts/bench/floor.c"]


@pytest.mark.slow
def test_modules_beside_a_script_are_its_own(unpacked: Path, tmp_path: Path) -> None:
    for name in ("protos", "sites", "topology", "orchestrator", "scripts"):
        (tmp_path / f"{name}.py").write_text(f"WHOSE = 'the script, {name}'")
    (tmp_path / "train.py").write_text(
        "import isthmus, orchestrator, protos, scripts, sites, topology\n"
        "print(isthmus.join.__name__, sites.WHOSE, protos.WHOSE, topology.WHOSE)"
    )
    done = run_python(unpacked, tmp_path, "train.py")
    assert done.stdout == "join the script, sites the script, protos the script, topology\n", done


@pytest.mark.slow
def test_what_lies_where_a_process_of_ours_starts_hides_nothing(
    unpacked: Path, tmp_path: Path
) -> None:
    for name in ("queue", "isthmus", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not for you')")
    done = run_python(unpacked, tmp_path, *own_command("isthmus.sites.facts")[1:])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["build"]


ENCODE = """
import hashlib, sys
import numpy as np
from isthmus.sites import compiled
from isthmus.sites.codecs.registry import BY_NAME
assert "Cython" not in sys.modules and "numba" not in sys.modules
values = np.random.default_rng(7).standard_normal(1000).astype(np.float32)
payloads = b"".join(bytes(codec.encode(values)) for codec in BY_NAME.values())
print(hashlib.sha256(payloads).hexdigest(), compiled.note_of_plain() or compiled.built().compiler)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "said"),
    [("cc", ""), ("zig", "zig 0."), ("plain", f"for {PLAIN} was set: install gcc")],
)
def test_codecs_give_the_same_bits_however_isthmus_was_installed(
    tmp_path: Path, way: str, said: str
) -> None:
    """With the compiler that is there, with the package index's, and with none."""
    if way == "cc" and why_plain() is not None:
        pytest.skip("there is no compiler")
    uv = str(Path(sys.executable).with_name("uv"))
    environ = {**os.environ, "PATH": str(tmp_path) if way == "zig" else os.environ["PATH"]}
    environ |= {PLAIN: "1"} if way == "plain" else {}
    environ.pop("CC", None)
    environ.pop("PYTHONPATH", None)
    venv = tmp_path / "venv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    build = [uv, "build", "--quiet", "--python", sys.executable, "-o", str(tmp_path), str(ROOT)]
    build += ["--build-constraints", str(ROOT / "constraints.txt")]
    done = subprocess.run(build, env=environ, capture_output=True, text=True, check=False)
    if way == "zig" and "ziglang" in done.stderr:
        pytest.skip("the package index has no ziglang")
    assert done.returncode == 0, done.stderr
    install = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin/python")]
    needed = ["-c", str(ROOT / "constraints.txt"), "google-crc32c", "numpy", "zstandard"]
    subprocess.run([*install, *needed], check=True)
    subprocess.run([*install, "--no-deps", str(next(tmp_path.glob("*.whl")))], check=True)
    environ.pop(PLAIN, None)
    done = subprocess.run(
        [str(venv / "bin/python"), "-c", ENCODE],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    values = np.random.default_rng(7).standard_normal(1000).astype(np.float32)
    payloads = b"".join(bytes(codec.encode(values)) for codec in BY_NAME.values())
    assert done.stdout.startswith(hashlib.sha256(payloads).hexdigest()), done.stderr
    assert said in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing_in_what_is_compiled(tmp_path: Path) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer, under the tests of compiled modules."""
    library = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("gcc has no libasan")
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    uv = [str(Path(sys.executable).with_name("uv")), "build", "--quiet", "--no-build-isolation"]
    subprocess.run(
        [*uv, "--python", sys.executable, "-o", str(tmp_path), str(ROOT)],
        env={**os.environ, "CC": "gcc", "CFLAGS": flags},
        check=True,
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "unpacked")
    environ = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "LD_PRELOAD": library,
        "PYTHONPATH": str(tmp_path / "unpacked"),
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )

    assert "heap-buffer-overflow" in run("-c", TOO_SHORT).stderr, "what they find is seen"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *SANITIZED)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


TOO_SHORT = """
import numpy as np
from isthmus.sites.codecs.kernels import loops
loops.write_halves(np.zeros(100_000, np.uint16), np.zeros(50_000, np.float32))
"""
SANITIZED = (
    "tests/sites/test_codec_kernels.py",
    "tests/sites/test_compiled.py",
    "tests/sites/test_frame_calls.py",
    "tests/sites/test_http2.py",
)


def run_python(built: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, where the wheel is installed."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_all_of_our_processes_start_alike() -> None:
    """By protos/own_processes.py, which says why."""
    pattern = re.compile(r"""["']-m["'],\s*f?["']isthmus""")
    for folder in (*FOLDERS, "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pattern.search(path.read_text()), path


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_raised_where_groups_are_caught(name: str) -> None:
    """Python before 3.11.4 makes a group of what is raised in `except*`, and later ones do not."""
    for path in (ROOT / name).rglob("*.py"):
        text = path.read_text()
        if "except*" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.TryStar):
                inside = [each for handler in node.handlers for each in ast.walk(handler)]
                raised = [each.lineno for each in inside if isinstance(each, ast.Raise)]
                assert not raised, f"{path}: lines {raised}"


def test_only_what_is_named_is_pinned_and_all_that_is_always_installed() -> None:
    """A pin of what others want, as torch wants its triton, may contradict them tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    named = {canonicalize_name(Requirement(line).name) for line in lines} - {"isthmus"}
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = {canonicalize_name(pin.name) for pin in pins}
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in pins)
    # triton is what torch says, and no version of atheris is for all of our Pythons.
    assert pinned == named - {"triton", "atheris"}


def test_one_version_stands_in_all_that_a_release_consists_of() -> None:
    """A released version has a date, and so has the tag of its commit."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = next(
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    )
    released = re.fullmatch(r"## \[(.+)\] - (\d{4}-\d\d-\d\d)", heading)
    if released is None:
        assert heading == f"## [Unreleased] {version}"
    else:
        assert released.groups() == (version, str(citation["date-released"]))
    assert isthmus.__version__ == citation["version"] == version
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert tags.split() == ([f"v{version}"] if tags else [])
    assert released is not None or not tags, "a tag's version is released: give it a date"


@pytest.mark.slow
class TestInstallCheck:
    """scripts/check_install.py, with an index of this test's own."""

    def test_what_fits_together_passes(self, tmp_path: Path) -> None:
        wheel(tmp_path, "torch", "2.13.0", "triton==3.7.1")
        wheel(tmp_path, "triton", "3.7.1")
        wheel(tmp_path, "triton", "3.9.0")
        code, out = check(tmp_path, constraints="torch==2.13.0")
        assert (code, out.count("can be installed")) == (0, 3), out

    @pytest.mark.exhaustive
    @pytest.mark.timeout(900)
    def test_a_release_is_built_installed_and_run(self) -> None:
        assert check_install.release(ROOT, []) is None

    def test_a_pin_of_what_another_package_wants_fails(self, tmp_path: Path) -> None:
        wheel(tmp_path, "torch", "2.13.0", "triton==3.7.1")
        wheel(tmp_path, "triton", "3.7.1")
        wheel(tmp_path, "triton", "3.9.0")
        code, out = check(tmp_path, constraints="torch==2.13.0\ntriton==3.9.0")
        assert (code, out.count("do not fit together")) == (1, 3), out
        assert "triton==3.7.1" in out

    def test_a_dependency_of_one_python_only_counts_there(self, tmp_path: Path) -> None:
        wheel(tmp_path, "torch", "2.13.0", "backport>=1; python_version < '3.12'")
        code, out = check(tmp_path, constraints="")
        assert code == 1
        assert "Python 3.11: its dependencies do not fit together" in out
        assert out.count("can be installed") == 2, out

    def test_a_wheel_for_other_pythons_fails(self, tmp_path: Path) -> None:
        wheel(tmp_path, "torch", "2.13.0", tag="cp312-cp312-manylinux_2_17_x86_64")
        code, out = check(tmp_path, constraints="")
        assert (code, out.count("can be installed")) == (1, 1), out

    def test_a_mirror_of_this_machine_does_not_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "own").mkdir()
        wheel(tmp_path / "own", "torch", "2.13.0")
        for installer in ("PIP", "UV"):
            monkeypatch.setenv(f"{installer}_FIND_LINKS", str(tmp_path / "own/simple/torch"))
        code, out = check(tmp_path, constraints="")
        assert (code, out.count("do not fit together")) == (1, 3), out

    @pytest.mark.exhaustive
    def test_an_index_that_does_not_answer_fails_and_is_named(self, tmp_path: Path) -> None:
        project(tmp_path, "")
        code, out = run_check(tmp_path, "http://127.0.0.1:1/simple")
        assert code == 1
        assert "nothing could be checked, for the package index does not answer" in out
        assert "can be installed" not in out


def wheel(folder: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> None:
    """Write a wheel that has metadata only, where the index has it."""
    place = folder / "simple" / name
    place.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(place / f"{name}-{version}-{tag}.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")


def project(folder: Path, constraints: str) -> None:
    """Write a project that needs torch."""
    text = '[project]\nname = "own"\nversion = "1"\ndependencies = ["torch"]\n'
    (folder / "pyproject.toml").write_text(text)
    (folder / "constraints.txt").write_text(constraints)


def check(folder: Path, constraints: str) -> tuple[int, str]:
    """Check the project with an index of the wheels that were written."""
    project(folder, constraints)
    with serving(folder) as url:
        return run_check(folder, f"{url}/simple")


def run_check(folder: Path, index: str) -> tuple[int, str]:
    """Return the check's exit status, and what it wrote."""
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts/check_install.py")),
            *("--project", str(folder), "--index", index),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback; its listings of folders are an index's pages."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
