"""What launchers decide without any I/O: diagnoses, versions, restarts, command lines."""

from __future__ import annotations

import json

import pytest

from isthmus.orchestrator.launchers.launcher import LaunchError
from isthmus.orchestrator.launchers.restarts import LONGEST_S, WITHIN_S, Restarts
from isthmus.orchestrator.launchers.slurm import allocation
from isthmus.orchestrator.launchers.ssh import parts_of_jump
from isthmus.orchestrator.launchers.tethered import check_versions, diagnosed
from isthmus.sites.tether import SPECS
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.tether_messages import Spec
from isthmus.topology.spec.world import Launcher


@pytest.mark.parametrize(
    ("status", "line", "reason"),
    [
        (127, "bash: line 1: python9: command not found", "python_missing"),
        (126, "bash: /root/bin/python: Permission denied", "python_missing"),
        (1, "/usr/bin/python3: No module named isthmus", "isthmus_missing"),
        (1, "ModuleNotFoundError: No module named 'isthmus'", "isthmus_missing"),
        (1, "/usr/bin/python3: No module named isthmus.sites.tether", "other_version"),
        (2, "unknown option -P", "python_missing"),
        (1, "Segmentation fault", "start_failed"),
        (None, "", "host_unreachable"),
    ],
)
def test_what_a_site_said_instead_of_a_greeting_is_understood(
    status: int | None, line: str, reason: str
) -> None:
    error = diagnosed(status, ["Welcome to eu!", line, ""], "python3")
    assert error.reason == reason
    assert error.cure


@pytest.mark.parametrize(
    "greeting",
    [
        '{"op": "versions", "build": "9.0", "control": [90, 91], "exchange": [90, 91]}',
        '{"build": "9.0", "control": [], "exchange": [1, 2]}',
        '{"build": "9.0"}',
        "[]",
        "nonsense",
    ],
)
def test_a_build_without_a_protocol_in_common_is_refused(greeting: str) -> None:
    with pytest.raises(LaunchError) as raised:
        check_versions(greeting)
    assert raised.value.reason == "other_version"


def test_secrets_stand_in_no_command() -> None:
    spec = Spec(
        folder="~/x", command=("python",), files={"key": b"\x00secret"}, env={}, silence_s=1.0
    )
    assert json.loads(line_of(spec))["files"] == {"key": "AHNlY3JldA=="}
    assert SPECS.read(line_of(spec)) == spec


def test_restarts_come_later_each_time_and_never_end() -> None:
    restarts, now_s, waits_s = Restarts(), 0.0, []
    for _ in range(30):
        waits_s.append(restarts.next_wait_s(now_s))
        now_s += waits_s[-1]
    assert waits_s[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S]
    assert set(waits_s[6:]) == {LONGEST_S}
    assert restarts.next_wait_s(now_s + WITHIN_S) == 1.0


@pytest.mark.parametrize(
    ("jump", "parts"),
    [("gate", ("", "gate", 22)), ("me@gate:2200", ("me", "gate", 2200))],
)
def test_a_jump_is_taken_apart(jump: str, parts: tuple[str, str, int]) -> None:
    assert parts_of_jump(jump) == parts


def test_slurm_gives_a_site_one_task() -> None:
    words = allocation(Launcher(kind="slurm", options=("--partition=gpu",)), "eu", 1)
    assert words[0] == "srun"
    assert {"--ntasks=1", "--job-name=isthmus-eu", "--partition=gpu"} <= set(words)
