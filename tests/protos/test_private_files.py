"""Secrets are read from files of their user alone, and made once."""

import os
from pathlib import Path

import pytest

from isthmus.protos.private_files import UnsafeFileError, make_secret, private_folder, read_secret


def test_a_secret_is_its_users_alone_and_made_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    make_secret(path, b"first")
    make_secret(path, b"second")
    assert read_secret(path) == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["token"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_what_others_may_read_or_write_is_no_secret(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"x" * 64)
    path.chmod(mode)
    with pytest.raises(UnsafeFileError, match=f"mode {mode:o}"):
        read_secret(path)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    make_secret(tmp_path / "token", b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UnsafeFileError, match="symbolic link"):
        read_secret(tmp_path / "link")
    with pytest.raises(UnsafeFileError, match="want a file"):
        read_secret(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, which takes root")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_secret(path, b"theirs")
    os.chown(path, 65534, 65534)
    with pytest.raises(UnsafeFileError, match="belongs to user 65534"):
        read_secret(path)


def test_a_folder_that_others_prepared_is_refused(tmp_path: Path) -> None:
    private_folder(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    for name in ("open", "link"):
        with pytest.raises(UnsafeFileError, match="everybody may write"):
            private_folder(tmp_path / name)
