"""Compiled kernels that nothing uses any more are removed; those that somebody uses stay."""

import os
import threading
from pathlib import Path

from sites.codecs.kernels.unused import NOTED_S, UNUSED_S, note_use, remove_unused

NOW_S = 1_800_000_000.0
KEPT = "zen5-0123456789abcdef"


def made(root: Path, name: str, age_s: float) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "one.o").write_bytes(b"code")
    os.utime(folder, (NOW_S - age_s, NOW_S - age_s))
    return folder


def names(root: Path) -> set[str]:
    return {each.name for each in root.iterdir()}


def test_only_what_nobody_has_used_for_long_goes(tmp_path: Path) -> None:
    kept = made(tmp_path, KEPT, UNUSED_S + 1)
    made(tmp_path, "zen5-aaaaaaaaaaaaaaaa", UNUSED_S + 1)
    made(tmp_path, "skylake-avx512-bbbbbbbbbbbbbbbb", UNUSED_S - 1)
    made(tmp_path, "notes", UNUSED_S + 1)
    made(tmp_path, ".removed-x", 0.0)
    elsewhere = made(tmp_path / "elsewhere", "zen5-cccccccccccccccc", UNUSED_S + 1)
    (tmp_path / "zen5-dddddddddddddddd").symlink_to(elsewhere)
    remove_unused(kept, NOW_S)
    assert names(tmp_path) == {
        *(KEPT, "skylake-avx512-bbbbbbbbbbbbbbbb", "notes", "elsewhere", "zen5-dddddddddddddddd")
    }
    assert (elsewhere / "one.o").is_file()


def test_use_is_noted_once_a_day_and_keeps_a_folder(tmp_path: Path) -> None:
    used = made(tmp_path, "zen5-aaaaaaaaaaaaaaaa", UNUSED_S + 1)
    note_use(used, NOW_S)
    assert used.stat().st_mtime == NOW_S
    note_use(used, NOW_S + NOTED_S)
    assert used.stat().st_mtime == NOW_S
    remove_unused(made(tmp_path, KEPT, 0.0), NOW_S + UNUSED_S)
    assert used.is_dir()
    note_use(tmp_path / "never", NOW_S)
    assert not (tmp_path / "never").exists()


def test_several_remove_the_same_at_once(tmp_path: Path) -> None:
    kept = made(tmp_path, KEPT, 0.0)
    for index in range(40):
        made(tmp_path, f"old-{index:016x}", UNUSED_S + 1)
    together = threading.Barrier(4)
    errors: list[BaseException] = []

    def remove() -> None:
        try:
            together.wait(10)
            remove_unused(kept, NOW_S)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert not errors
    remove_unused(kept, NOW_S)
    assert names(tmp_path) == {KEPT}
