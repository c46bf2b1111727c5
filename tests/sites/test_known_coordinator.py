"""No older coordinator commands an agent, and none that does not know its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.protos.errors import StaleGenerationError
from isthmus.sites.agent.known_coordinator import KnownCoordinator


def test_an_older_generation_is_refused_also_by_the_next_agent(tmp_path: Path) -> None:
    known = KnownCoordinator(tmp_path, "a")
    known.meet("j", 3, is_running=False)
    known.meet("j", 5, is_running=True)
    again = KnownCoordinator(tmp_path, "a")
    assert (again.journal, again.generation) == ("j", 5)
    with pytest.raises(StaleGenerationError, match="of generation 4; this site has heard of 5"):
        again.meet("j", 4, is_running=False)
    assert KnownCoordinator(tmp_path, "b").generation == 0, "each site has its own"


def test_another_journal_is_refused_while_a_run_goes_on(tmp_path: Path) -> None:
    known = KnownCoordinator(tmp_path, "a")
    known.meet("j", 5, is_running=False)
    with pytest.raises(StaleGenerationError, match="another --state"):
        known.meet("k", 9, is_running=True)
    known.meet("k", 1, is_running=False)
    assert (known.journal, known.generation) == ("k", 1)


def test_a_damaged_file_and_a_folder_that_cannot_be_written_stop_nobody(tmp_path: Path) -> None:
    (tmp_path / "agent-a.json").write_text("[")
    known = KnownCoordinator(tmp_path, "a")
    assert known.generation == 0
    known = KnownCoordinator(tmp_path / "none", "a")
    known.meet("j", 1, is_running=False)
    assert known.generation == 1
