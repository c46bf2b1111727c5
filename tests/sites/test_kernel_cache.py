"""Where compiled kernels are kept: only what this user wrote is run, and nothing stays for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import platformdirs
import pytest

from isthmus.sites.codecs.kernels.kernel_cache import NOTED_S, UNUSED_S, cache_file, keep, read_kept

ROOT = Path(__file__).parents[2]
NAME = "zen5-0123456789abcdef.o"


def run_python(code: str, cache: Path) -> str:
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


HALVE = """
import logging, sys
logging.basicConfig()
import numpy as np
from isthmus.sites.codecs.kernels.kernel_cache import FLOAT, FLOATS, NOTHING, kernel, load_kernels
def halve(out, divisor):
    for i in range(out.size):
        out[i] = out[i] / divisor
halve = kernel(NOTHING, FLOATS, FLOAT)(halve)
load_kernels()
values = np.ones(3, dtype=np.float32)
halve(values, np.float32(2))
print(values.tolist(), "numba" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_machine_code_is_kept_and_made_again_where_it_is_damaged(tmp_path: Path) -> None:
    assert "[0.5, 0.5, 0.5] True" in run_python(HALVE, tmp_path)
    assert "[0.5, 0.5, 0.5] False" in run_python(HALVE, tmp_path)
    (kept,) = tmp_path.glob("isthmus/kernels/*.o")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert "[0.5, 0.5, 0.5] True" in run_python(HALVE, tmp_path)
    assert list(kept.parent.iterdir()) == [kept], "nothing else is left"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_without_a_folder_to_write_to_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    said = run_python(HALVE, blocked)
    assert "[0.5, 0.5, 0.5] True" in said
    assert "kernels are compiled again at the next start" in said


def test_machine_code_that_others_could_have_written_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cache" / NAME
    keep(file, b"code")
    assert read_kept(file) == b"code"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    for path, mode in ((file, 0o620), (file, 0o602), (file.parent, 0o770), (file.parent, 0o707)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert read_kept(file) is None, (path, mode)
        if path == file.parent:
            keep(file, b"more")
            assert "others may write there" in caplog.messages[-1]
        path.chmod(before)
        assert read_kept(file) == b"code"
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert read_kept(file) is None, "another user's"
    assert list(file.parent.iterdir()) == [file]


def test_machine_code_of_another_processor_is_not_run(tmp_path: Path) -> None:
    """Somebody may have moved files."""
    tmp_path.chmod(0o700)
    keep(tmp_path / NAME, b"code")
    (tmp_path / NAME).rename(tmp_path / "skylake-0123456789abcdef.o")
    assert read_kept(tmp_path / "skylake-0123456789abcdef.o") is None


def test_without_a_home_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    for found in (unknown, lambda *_: Path("~/.cache/isthmus")):  # by the release of platformdirs
        monkeypatch.setattr(platformdirs, "user_cache_path", found)
        assert cache_file() is None
    keep(None, b"code")
    assert "set XDG_CACHE_HOME" in caplog.messages[-1]


def test_what_cannot_be_written_to_the_end_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / NAME).mkdir()  # what nothing can take the place of
    keep(tmp_path / NAME, b"code")
    assert "compiled again" in caplog.messages[-1]
    assert [each.name for each in tmp_path.iterdir()] == [NAME]


def aged(path: Path, age_s: float) -> Path:
    path.write_bytes(b"code")
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_only_what_nobody_has_used_for_long_goes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    aged(tmp_path / "zen5-aaaaaaaaaaaaaaaa.o", UNUSED_S + 60)
    aged(tmp_path / "zen5-bbbbbbbbbbbbbbbb.o.x1_y2", UNUSED_S + 60)  # not written to its end
    aged(tmp_path / "skylake-avx512-cccccccccccccccc.o", UNUSED_S - 60)
    aged(tmp_path / "notes", UNUSED_S + 60)
    keep(tmp_path / NAME, b"code")
    assert {each.name for each in tmp_path.iterdir()} == {
        *(NAME, "skylake-avx512-cccccccccccccccc.o", "notes")
    }


def test_use_is_noted_once_a_day(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    keep(tmp_path / NAME, b"code")
    for age_s, is_noted in ((NOTED_S - 60, False), (NOTED_S + 60, True)):
        then_s = time.time() - age_s
        os.utime(tmp_path / NAME, (then_s, then_s))
        assert read_kept(tmp_path / NAME) == b"code"
        assert ((tmp_path / NAME).stat().st_mtime > then_s + 1) == is_noted


def test_several_write_and_remove_the_same_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for index in range(40):
        aged(tmp_path / f"old-{index:016x}.o", UNUSED_S + 60)
    together = threading.Barrier(4)

    def write() -> None:
        together.wait(10)
        keep(tmp_path / NAME, b"code")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert [each.name for each in tmp_path.iterdir()] == [NAME]
    assert read_kept(tmp_path / NAME) == b"code"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.exhaustive
def test_only_gateways_load_kernels(tmp_path: Path) -> None:
    """Ranks would import LLVM for nothing."""
    code = (
        "import sys, isthmus.sites.worker.exchange.exactness, isthmus.sites.worker.exchange.shard_encoder, isthmus.sites.agent.site_processes; "
        "print(sorted({'llvmlite', 'numba', 'isthmus.sites.codecs'} & set(sys.modules)))"
    )
    assert run_python(code, tmp_path).strip() == "[]"
