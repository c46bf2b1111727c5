"""Variables that a job passes on: to its sites, again after a restart, and into nothing else."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from isthmus.protos.limits import PASSED_ENV_BYTES
from tests.fakes.coordinators import coordinating, status_of
from tests.fakes.worlds import JOB

pytestmark = pytest.mark.slow

SECRET = "5ecret"
PASSING = f"{JOB}pass_env: [TOKEN]\n"


def written(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def holding_secret(folder: Path) -> list[str]:
    found = [path for path, content in written(folder).items() if SECRET.encode() in content]
    return [str(path.relative_to(folder)) for path in found]


async def test_sites_get_the_values_and_one_private_file_has_them_until_the_end(
    tmp_path: Path,
) -> None:
    async with coordinating(tmp_path) as bench:
        agents = await bench.join("a", "b")
        await bench.submit(job=PASSING, passed_env={"TOKEN": SECRET, "PATH": "/else"})
        for agent in agents:
            message = await agent.hear("prepare")
            assert dict(message.prepare.passed_env) == {"TOKEN": SECRET}
        assert holding_secret(tmp_path) == ["passed_env/run-1"]
        file = tmp_path / "passed_env" / "run-1"
        assert file.stat().st_mode & 0o777 == 0o600
        bench.control.runs.cancel("run-1", "done")
        for agent in agents:
            await agent.hear("stop")
            await agent.end()
        await bench.ended()
        assert SECRET not in str(await bench.get("run-1"))
        assert all(SECRET not in str(each) for each in bench.control.runs.events_of("run-1", 0))
    assert written(tmp_path)
    assert holding_secret(tmp_path) == []


async def test_a_queued_run_has_them_after_a_restart(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        await bench.submit("first")
        await bench.submit("run-1", job=PASSING, passed_env={"TOKEN": SECRET})
        assert (await bench.get("run-1")).position == 1
    assert holding_secret(tmp_path) == ["passed_env/run-1"]
    async with coordinating(tmp_path) as bench:
        agents = await bench.join("a", "b")
        if (await bench.get("first")).ended_wall_s == 0:
            bench.control.runs.cancel("first", "room for the next")
        message = await agents[0].hear("prepare")
        while message.prepare.run_id == "first":
            await agents[0].end()
            message = await agents[0].hear("prepare")
        assert dict(message.prepare.passed_env) == {"TOKEN": SECRET}


async def test_a_request_without_a_value_or_with_too_many_is_refused(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        status, told = await status_of(bench.submit(job=PASSING))
        assert (status, "no value of TOKEN" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        long = {"TOKEN": "x" * PASSED_ENV_BYTES}
        status, told = await status_of(bench.submit(job=PASSING, passed_env=long))
        assert (status, "16 KiB" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert not (tmp_path / "passed_env").exists()
