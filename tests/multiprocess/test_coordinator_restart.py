"""The coordinator is killed while two sites train, and started again: the same run succeeds."""

import json
import os
import signal

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, Result, job_yaml, topology_yaml

pytestmark = [UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow]


class Deployment:
    """A coordinator and an agent for each site, started by hand."""

    def __init__(
        self,
        run: Bench,
        job: str,
        *,
        sites: int = 2,
        min_sites: int | None = None,
    ) -> None:
        """Launch a job."""
        self.run = run
        topology = topology_yaml(
            [(1, 1)] * sites, emulate=False, detect_within="5s", min_sites=min_sites
        )
        path = run.write(topology, job)
        self.topology = str(run.folder / "topology.yaml")
        self.state = run.folder / "coordinator"
        self.address = self.start("127.0.0.4:0")
        for site in "abcd"[:sites]:
            run.start(
                *("agent", "--site", site, "--coordinator", self.address),
                *("--topology", self.topology, "--state", str(run.folder / f"agent-{site}")),
            )
        launched = self.isthmus(
            *("launch", str(path), "--run-id", "one", "--detach", "--coordinator", self.address)
        )
        assert launched.code == 0, launched.err

    def start(self, bind: str) -> str:
        """Start a coordinator; return where it listens."""
        announced = self.state / "coordinator.json"
        announced.unlink(missing_ok=True)
        self.run.start(
            *("coordinator", "--topology", self.topology, "--state", str(self.state)),
            *("--bind", bind),
        )
        self.run.wait_for("the coordinator", announced.exists, 30)
        address = json.loads(announced.read_text())["address"]
        assert isinstance(address, str)
        return address

    def kill(self) -> None:
        """Kill the coordinator."""
        os.kill(self.run.pids("isthmus.orchestrator.coordinator")[0], signal.SIGKILL)

    def isthmus(self, *arguments: str) -> Result:
        return self.run.isthmus(*arguments, "--json")

    def steps(self) -> list[tuple[str, int]]:
        """Return site and step of each step that was told."""
        metrics = self.state / "runs" / "one" / "metrics.jsonl"
        if not metrics.exists():
            return []
        whole, _, _ = metrics.read_text().rpartition("\n")  # the last line may be half written
        records = [json.loads(line) for line in whole.splitlines()]
        return [(each["site"], each["step"]) for each in records if each["kind"] == "step"]

    def check(self, steps: int) -> None:
        """Check that the run has succeeded, and that the journal and the metrics have all of it."""
        done = self.isthmus("wait", "one", "--timeout", "100s")
        assert done.code == 0, f"{done.out}\n{done.err}\n{self.run.logs()}"
        every = [(site, step) for site in ("a", "b") for step in range(1, steps + 1)]
        assert sorted(set(self.steps())) == every
        assert len(self.steps()) < len(every) + 10, "but for what was just on the way"
        events = self.isthmus("events", "one").check()
        kinds = [each["kind"] for each in events.envelope["data"]["events"]]
        assert kinds.count("run.submitted") == kinds.count("run.resumed") == 1
        assert kinds.count("agent.returned") == 2
        assert kinds.count("site.prepared") == kinds.count("site.running") == 2
        assert kinds[-1] == "run.ended"


@pytest.mark.exhaustive
def test_the_same_run_succeeds_and_no_step_is_lost(run: Bench) -> None:
    deployed = Deployment(run, job_yaml(steps=600))
    run.wait_for("first steps", lambda: len(deployed.steps()) > 40)
    deployed.kill()
    text = topology_yaml([(1, 1), (1, 1)], emulate=False, rtt="77ms")
    other = run.write_topology("other.yaml", text)
    wrong = ("coordinator", "--topology", str(other), "--state", str(deployed.state))
    refused = run.isthmus(*wrong, "--bind", deployed.address, "--json")
    assert (refused.code, refused.envelope["error"]["code"]) == (8, "RUN_UNREADABLE")
    assert deployed.start(deployed.address) == deployed.address
    deployed.check(600)


@pytest.mark.exhaustive
def test_what_ended_meanwhile_is_told_to_the_next_coordinator(run: Bench) -> None:
    deployed = Deployment(run, job_yaml(steps=1000))
    run.wait_for("first steps", lambda: len(deployed.steps()) > 40)
    deployed.kill()
    assert run.pids("isthmus.sites.node.rank")
    run.wait_for("the end at both sites", lambda: not run.pids("isthmus.sites.node.rank"), 90)
    deployed.start(deployed.address)
    deployed.check(1000)
