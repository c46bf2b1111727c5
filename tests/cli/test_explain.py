"""`isthmus explain` says what the documentation's pages say, and each error points at it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from isthmus.orchestrator.cli.documented import error_texts, status_texts
from isthmus.orchestrator.cli.main import COMMANDS
from isthmus.protos.catalogue import CATALOGUE, ExitCode
from tests.cli.conftest import Isthmus

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_has_the_text_of_each_code_and_exit_status() -> None:
    assert set(error_texts()) == set(CATALOGUE)
    assert set(status_texts()) > {int(code) for code in ExitCode}
    for text in (*error_texts().values(), *status_texts().values()):
        assert text
        assert "](" not in text
        assert "\n##" not in text


@pytest.mark.parametrize("name", ["RANK_KILLED", "rank_killed", "rank-killed"])
def test_a_code_is_explained_however_it_is_written(isthmus: Isthmus, name: str) -> None:
    done = isthmus("explain", name)
    assert done.code == 0
    assert "the kernel's answer to a lack of memory" in " ".join(done.out.split())
    assert CATALOGUE["RANK_KILLED"].hint.split()[0] in done.out
    assert "exit 1: the training job failed" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_no_text_is_wider_than_a_terminal_or_lost(isthmus: Isthmus, code: str) -> None:
    done = isthmus("explain", code)
    assert " ".join(error_texts()[code].split()) in " ".join(done.out.split())
    assert all(len(line) <= 80 or " " not in line for line in done.out.splitlines())


def test_lists_stay_lists(isthmus: Isthmus) -> None:
    lines = isthmus("explain", "PARAMETERS_DIFFER").out.splitlines()
    assert sum(line.startswith(("1. ", "2. ", "3. ", "4. ")) for line in lines) == 4


def test_an_exit_status_has_its_codes(isthmus: Isthmus) -> None:
    done = isthmus("explain", "5")
    assert "exit 5: timed out waiting" in done.out
    assert "TIMED_OUT" in done.out
    assert isthmus("explain", "130").out.startswith("exit 130: ")


@pytest.mark.parametrize(
    ("typed", "meant"), [("RANK_KILED", "RANK_KILLED"), ("sitelost", "SITE_LOST"), ("131", "130")]
)
def test_a_typo_gets_a_close_match(isthmus: Isthmus, typed: str, meant: str) -> None:
    done = isthmus("explain", typed)
    assert done.code == 2
    assert f"did you mean {meant}?" in done.err
    assert "lists them all" in done.err


def test_what_is_like_no_code_gets_the_list(isthmus: Isthmus) -> None:
    done = isthmus("explain", "zzzzzz")
    assert "did you mean" not in done.err
    assert "`isthmus explain` lists them all." in done.err


def test_alone_it_lists_each_code_in_a_line(isthmus: Isthmus) -> None:
    lines = isthmus("explain").out.splitlines()
    for code, entry in CATALOGUE.items():
        (line,) = [each for each in lines if each.split()[:1] == [code]]
        assert entry.message in line
    assert len(isthmus("explain", "--json").envelope["data"]["codes"]) == len(CATALOGUE)


def test_an_error_points_at_it_unless_usage_says_more(isthmus: Isthmus) -> None:
    assert "isthmus explain RUN_NOT_FOUND" in isthmus("status", "gone").err
    assert "isthmus explain" not in isthmus("status", "--nonsense").err
    assert "explain" in COMMANDS


def test_the_index_says_who_made_it_for_whom() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"]
    assert project["keywords"]
    assert "Operating System :: POSIX :: Linux" in project["classifiers"]
