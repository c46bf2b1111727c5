"""Two sites over a real sshd, as `isthmus up` starts them: what is killed there comes back."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.sshd import Sshd, sshd
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, topology_yaml
from tests.multiprocess.test_up import credentials, of_run

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(700),
]

DETECT_S = 5.0
RETURN_S = 120.0
"""An agent is found dead, started over SSH again, and its site let in."""


class Deployment:
    """Sites a and b over SSH, and a run at them."""

    def __init__(self, run: Bench, server: Sshd, job: str) -> None:
        self.run, self.server = run, server
        text = topology_yaml(
            [(1, 1), (1, 1)],
            emulate=False,
            addresses=["127.0.0.2", "127.0.0.3"],
            detect_within=f"{DETECT_S:g}s",
            min_sites=1,
            max_restarts=9,
        )
        for site in "ab":
            launcher = server.launcher(sys.executable, run.folder / f"at-{site}")
            text = text.replace(f"name: {site}, ", f"name: {site}, launcher: {launcher}, ")
        path = run.write(text, job)
        self.topology = str(run.folder / "topology.yaml")
        run.isthmus("up", self.topology).check()
        run.isthmus("launch", str(path), "--run-id", "r", "--detach").check()

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the processes of site b whose command line holds all words, the agent first."""
        found = []
        for pid in of_run(self.run):
            try:
                process = psutil.Process(pid)
                line = " ".join(process.cmdline())
                is_there = str(self.run.folder / "at-b") in process.cwd() + line
            except psutil.Error:
                continue
            if is_there and all(word in line for word in words):
                found.append(process)
        return sorted(found, key=lambda each: each.create_time())

    def events(self, kind: str, site: str) -> list[dict[str, Any]]:
        events = self.run.isthmus("events", "r", "--json").check().envelope["data"]["events"]
        return [each for each in events if (each["kind"], each["site"]) == (kind, site)]

    def status(self) -> dict[str, Any]:
        data: dict[str, Any] = self.run.isthmus("status", "r", "--json").check().envelope["data"]
        return data

    def wait_for_steps(self, num_steps: int) -> None:
        """Wait until the parameters of all who take part were equal after so many more steps."""

        def verified() -> float:
            steps: float = self.status()["totals"].get("verified_steps", 0)
            return steps

        least = verified() + num_steps
        self.run.wait_for(f"{num_steps} steps", lambda: verified() >= least, RETURN_S)

    def wait_for_return(self, num_times: int) -> None:
        """Wait until site b has come back so many times, and trains with a again."""
        self.run.wait_for(
            "the return", lambda: len(self.events("site.returned", "b")) == num_times, RETURN_S
        )
        self.wait_for_steps(20)
        assert self.status()["members"] == ["a", "b"]

    def end(self) -> None:
        """Cancel the run, and end all."""
        self.run.isthmus("cancel", "r", "--json").check()
        self.run.isthmus("wait", "r", "--timeout", "60s").check(6)
        self.run.isthmus("down", self.topology).check()
        assert of_run(self.run) == []
        assert credentials(self.run) == []
        assert self.server.sessions() == []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as made:
        yield made


VICTIMS = {
    "gateway": ("isthmus.sites.gateway",),
    "rank": ("isthmus.sites.node.rank",),
    "agent": ("isthmus.sites.agent", "--site"),
    "node": (),  # all that is there
}


def test_a_site_comes_back_whatever_is_killed_there(run: Bench, server: Sshd) -> None:
    deployed = Deployment(run, server, job_yaml(steps=99_999, codec="int8"))
    run.wait_for("first steps", lambda: deployed.status()["state"] == "ACTIVE")
    deployed.wait_for_steps(20)
    for times, (victim, words) in enumerate(VICTIMS.items(), 1):
        victims = deployed.processes(*words)
        assert victims, victim
        if victim != "node":
            victims = victims[-1:] if victim == "rank" else victims[:1]
        killed_s = time.time()
        for each in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # a leash may have been quicker
                each.kill()
        deployed.wait_for_return(times)
        returned_s = deployed.events("site.returned", "b")[-1]["wall_s"]
        print(
            f"{run.security}: after SIGKILL of {victim} it is back in {returned_s - killed_s:.1f} s"
        )
    deployed.end()


def test_a_site_is_added_dropped_and_added_again(run: Bench, server: Sshd) -> None:
    text = job_yaml(steps=99_999, codec="int8") + "begin_with: [a]\n"
    deployed = Deployment(run, server, text)
    run.wait_for("first steps", lambda: deployed.status()["state"] == "ACTIVE")
    deployed.wait_for_steps(20)
    run.isthmus("sites", "add", "b", "--json").check()
    deployed.wait_for_return(1)
    run.isthmus("sites", "drop", "b", "--json").check()
    run.wait_for("the drop", lambda: deployed.status()["members"] == ["a"], RETURN_S)
    run.isthmus("sites", "add", "b", "--json").check()
    deployed.wait_for_return(2)
    deployed.end()
