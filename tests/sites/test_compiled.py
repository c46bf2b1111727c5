"""What is compiled where isthmus is installed, and when it is used."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.protos.own_processes import own_command
from isthmus.sites import compiled
from isthmus.sites.compiled import MODULES, PACKAGE, PLAIN, Build, StaleError, folder_below
from tests.fakes.compiled_modules import COMPILED


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pretend that isthmus lies in a folder, with its sources and nothing compiled."""
    for name in MODULES:
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}")
    monkeypatch.setattr(compiled, "PACKAGE", tmp_path)
    monkeypatch.delenv(PLAIN, raising=False)
    compiled.built.cache_clear()
    yield tmp_path
    compiled.built.cache_clear()


def leave_note(package: Path, lacks: str = "") -> Path:
    """Write what the backend would; return the folder."""
    folder = folder_below(package)
    folder.mkdir(parents=True)
    note = Build(digest=compiled.digest_of(package), compiler="cc 1", lacks=lacks)
    note.write(folder)
    return folder


def test_what_was_compiled_is_found_first(checkout: Path) -> None:
    folder = leave_note(checkout)
    assert compiled.why_plain() is None
    assert compiled.note_of_plain() is None
    path = compiled.search_path("isthmus.sites.codecs.kernels", ["own"])
    assert path[-2:] == [str(folder / "common/sites/codecs/kernels"), "own"]
    faster = [str(folder / f"{kind}/sites/codecs/kernels") for kind in ("avx512", "avx2")]
    assert path[:-2] in (faster, faster[1:], [])


@pytest.mark.parametrize("ending", [".py", ".pxd"])
def test_a_file_that_changed_is_refused(checkout: Path, ending: str) -> None:
    leave_note(checkout)
    file = checkout.joinpath(*MODULES[0].split(".")).with_suffix(ending)
    file.write_text("# later")
    with pytest.raises(StaleError, match="pip install -e"):
        compiled.search_path("isthmus.sites.codecs.kernels", ["own"])


@pytest.mark.parametrize(
    ("lacks", "variable", "said"),
    [
        ("no C compiler works", "", "for no C compiler works: install gcc"),
        ("", "1", f"for {PLAIN} is set: install gcc (or clang) and Python's headers, then"),
        (None, "", f"for {compiled.NOT_INSTALLED}"),
    ],
)
def test_else_it_runs_as_plain_python_and_says_why(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, lacks: str | None, variable: str, said: str
) -> None:
    if lacks is not None:
        leave_note(checkout, lacks)
    monkeypatch.setenv(PLAIN, variable)
    assert compiled.search_path("isthmus.sites.codecs.kernels", ["own"]) == ["own"]
    assert said in (compiled.note_of_plain() or "")


@COMPILED
def test_what_runs_here_is_compiled() -> None:
    for name in MODULES:
        file = importlib.import_module(f"isthmus.{name}").__file__
        assert file is not None
        assert Path(file).is_relative_to(folder_below(PACKAGE)), file


def run(variable: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, PLAIN: variable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("variable", [pytest.param("", marks=COMPILED), "1"])
def test_a_gateway_says_in_one_line_that_it_is_slow(variable: str) -> None:
    done = run(variable, *own_command("isthmus.sites.gateway")[1:])
    lines = [line for line in done.stderr.splitlines() if "plain Python" in line]
    assert (done.returncode, len(lines)) == (0, len(variable)), done.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_without_cython_plain_modules_find_what_they_need_of_it() -> None:
    hidden = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('cython', 'Cython') and 'cython' not in sys.modules:\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'cython' else real(name, *a)\n"
        "sys.meta_path.insert(0, Hidden)\n"
        "import numpy as np\n"
        "from isthmus.sites.codecs.kernels import loops\n"
        "values = np.ones(3, dtype=np.float32)\n"
        "loops.divide(values, np.float32(2))\n"
        "print(values.tolist(), loops.__file__[-3:], sys.modules['cython'].__file__)\n"
    )
    done = run("1", "-c", hidden)
    expected = f"[0.5, 0.5, 0.5] .py {folder_below(PACKAGE) / 'cython.py'}\n"
    assert done.stdout == expected, done.stderr


def test_no_loop_over_elements_keeps_the_lock() -> None:
    tree = ast.parse((PACKAGE / "sites/codecs/kernels/loops.py").read_text())
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        free = [
            loop
            for block in ast.walk(function)
            if isinstance(block, ast.With) and ast.unparse(block.items[0]) == "cython.nogil"
            for loop in ast.walk(block)
            if isinstance(loop, ast.For)
        ]
        loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
        assert len(loops) == len(free), function.name


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.multiprocess
def test_codecs_keep_their_promises_as_plain_python() -> None:
    tests = Path(__file__).with_name("test_codecs.py")
    done = run("1", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert done.returncode == 0, done.stdout
