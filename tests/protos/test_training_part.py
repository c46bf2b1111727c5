"""A machine that lacks what ranks and gateways need says so in one sentence, with the cure."""

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from isthmus.protos.training_part import NEEDED, CannotTrainError, require_training_part, what_lacks

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_table_is_the_extra() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert [f"{package}>={oldest}" for package, oldest in NEEDED.items()] == extras["train"]


def test_this_machine_can_train() -> None:
    assert what_lacks() is None
    require_training_part()


@pytest.mark.parametrize(
    ("version", "lack"),
    [
        ("2.8.0", "torch is 2.8.0, older than 2.9"),
        ("2.4.1+cu124", "torch is 2.4.1+cu124, older than 2.9"),
        ("1.13", "torch is 1.13, older than 2.9"),
        ("2.9.0", None),
        ("2.9", None),
        ("2.10.0a0+git1f2e3d", None),
        ("3", None),
        ("built here", None),
        (None, None),
    ],
)
def test_versions_are_compared_as_numbers(
    version: str | None, lack: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_of(package: str) -> str:
        if package != "torch":
            return real(package)
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version_of)
    assert what_lacks() == lack
    if lack:
        with pytest.raises(
            CannotTrainError, match=re.escape(f"{lack}: pip install 'isthmus[train]'")
        ):
            require_training_part()


def test_all_that_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    absent = {"torch", "google_crc32c"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else real(name)
    )
    assert what_lacks() == "google-crc32c, torch are not installed"
    absent.remove("google_crc32c")
    assert what_lacks() == "torch is not installed"
