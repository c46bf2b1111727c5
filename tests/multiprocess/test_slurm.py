"""Sites under a real Slurm: `up` by srun, batch jobs, time limits and requeues."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from isthmus.orchestrator.rendering.slurm_script import slurm_script
from isthmus.topology.documents.load import load_topology
from tests.fakes.slurm import Slurm, slurm
from tests.fakes.sshd import sshd
from tests.fakes.waiting import wait_for
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml
from tests.multiprocess.test_up import credentials, of_run
from tests.multiprocess.test_up import written as written_with

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
]

SITES = "abc"


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm") / "here"
    with slurm(folder, "part_a=1", "part_b=1", "part_c=2") as made:
        monkeypatch.setenv("SLURM_CONF", str(made.folder / "slurm.conf"))
        yield made


def written(run: Bench, *options: str, steps: int = 3, checkpoint: str = "") -> str:
    """Write the topology of three sites, each in a partition of its own; return its path."""
    text = topology_yaml(
        [(1, 1)] * len(SITES),
        emulate=False,
        addresses=[f"127.0.0.{2 + index}" for index in range(len(SITES))],
        min_sites=1,
        detect_within="5s",
    )
    for site in SITES:
        words = ", ".join(f'"{each}"' for each in (f"--partition=part_{site}", *options))
        launcher = f"{{kind: slurm, python: {sys.executable}, folder: {run.folder}/at-{site}, options: [{words}]}}"
        text = text.replace(f"name: {site}, ", f"name: {site}, launcher: {launcher}, ")
    run.write(text, job_yaml(steps=steps) + checkpoint)
    return str(run.folder / "topology.yaml")


def nodes_of_ranks(run: Bench) -> set[str]:
    """Return Slurm's names of the nodes on which ranks run."""
    pids = run.pids("isthmus.sites.node.rank")
    return {psutil.Process(pid).environ()["SLURMD_NODENAME"] for pid in pids}


def test_a_cluster_ends_with_the_test_that_started_it(tmp_path: Path) -> None:
    """The test is killed while a job runs, and the controller is, too."""
    folder = tmp_path / "here"
    program = textwrap.dedent(
        f"""
        import os, pathlib, subprocess, sys
        from tests.fakes.slurm import slurm
        with slurm(pathlib.Path({str(folder)!r}), "only=1") as made:
            os.environ["SLURM_CONF"] = str(made.folder / "slurm.conf")
            subprocess.Popen(["srun", "sh", "-c", "echo began; sleep 600"])
            print(made.folder, flush=True)
            sys.stdin.read()
        """
    )
    mark = f"SLURM_CONF={folder / 'slurm.conf'}".encode()

    def left() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found.append((path / "comm").read_text().strip())
        return found

    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        said = {process.stdout.readline().strip() for _ in range(2)}
        if said == {""}:
            pytest.skip("no Slurm here")
        assert said == {"began", str(folder)}
        assert {"slurmctld", "slurmd", "munged", "slurmstepd", "sleep"} <= set(left())
        for each in psutil.process_iter(["name"]):
            name, env = each.info["name"], "SLURM_CONF"
            if name == "slurmctld" and str(folder) in each.environ().get(env, ""):
                each.kill()
        process.kill()
    wait_for(lambda: left() == [] and not folder.exists(), lambda: str(left()), 60)


def test_three_sites_from_up_to_down_leave_nothing_in_the_queue(run: Bench, cluster: Slurm) -> None:
    topology = written(run)
    up = run.isthmus("up", topology, "--json").check()
    assert {each["state"] for each in up.envelope["data"]["sites"]} == {"up"}
    assert sorted(cluster.jobs("%P:%j")) == [f"part_{site}:isthmus-site-{site}" for site in SITES]
    launched = run.isthmus("launch", str(run.folder / "job.yaml"), "--json").check()
    assert launched.envelope["data"]["verified_steps"] == 1 + 3
    run.isthmus("down", topology).check()
    assert cluster.jobs() == []
    assert of_run(run) == []
    assert credentials(run) == []


def test_a_site_of_two_nodes_has_one_allocation(
    run: Bench, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("slurm") / "here"
    with slurm(folder, "part_a=2", "part_b=1", "part_c=1") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        topology = Path(written(run, steps=100_000))
        topology.write_text(topology.read_text().replace("nodes: 1", "nodes: 2", 1))
        run.isthmus("up", str(topology)).check()
        assert sorted(cluster.jobs("%P:%D")) == ["part_a:2", "part_b:1", "part_c:1"]
        job = str(run.folder / "job.yaml")
        run.isthmus("launch", job, "--run-id", "r", "--detach").check()

        def events() -> str:
            return run.isthmus("events", "r", "--json").check().out

        run.wait_for(
            "ranks of four nodes", lambda: len(run.pids("isthmus.sites.node.rank")) == 4, 60
        )
        run.wait_for("the run", lambda: "run.active" in events(), 60)
        assert nodes_of_ranks(run) == {"part_a1", "part_a2", "part_b1", "part_c1"}
        processes = [psutil.Process(pid) for pid in run.pids("-m isthmus.sites.node ")]
        (supervisor,) = (
            each for each in processes if each.cmdline()[1:] == ["-P", "-m", "isthmus.sites.node"]
        )
        supervisor.kill()  # the others are srun's
        run.wait_for("the loss of the site", lambda: "site.lost" in events(), 60)
        assert "NODE_LOST" in events()
        run.wait_for("the end of the step", lambda: not run.pids("-m isthmus.sites.node "), 30)
        run.isthmus("cancel", "r").check()
        run.isthmus("down", str(topology)).check()
        assert cluster.jobs() == []
        assert of_run(run) == []


def test_the_nodes_of_a_site_come_from_two_partitions(
    run: Bench, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("slurm") / "here"
    with slurm(folder, "part_a=1", "part_b=1", "part_c=1", "part_d=1") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        topology = Path(written(run))
        text = topology.read_text().replace("nodes: 1", "nodes: 2", 1)
        options = '"--partition=part_a", "--nodes=1", ":", "--partition=part_d", "--nodes=1"'
        topology.write_text(text.replace('"--partition=part_a"', options))
        run.isthmus("up", str(topology)).check()
        parts = ["part_a:1", "part_b:1", "part_c:1", "part_d:1"]
        assert sorted(cluster.jobs("%P:%D")) == parts
        job = str(run.folder / "job.yaml")
        run.isthmus("launch", job, "--run-id", "r", "--detach").check()
        run.wait_for(
            "ranks of four nodes", lambda: len(run.pids("isthmus.sites.node.rank")) == 4, 60
        )
        assert nodes_of_ranks(run) == {"part_a1", "part_b1", "part_c1", "part_d1"}
        run.isthmus("wait", "r").check()
        run.isthmus("down", str(topology)).check()
        assert cluster.jobs() == []
        assert of_run(run) == []


def test_a_job_that_still_waits_is_taken_out_of_the_queue(run: Bench, cluster: Slurm) -> None:
    """One partition is full, so that site's allocation cannot begin."""
    cluster.said(
        "sbatch",
        "--partition=part_c",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "sleep 600",
    )
    topology = written(run)
    failed = run.isthmus("up", topology, "--timeout", "15s", "--json").check(4)
    (part,) = failed.envelope["error"]["where"]["parts"]
    assert part["part"] == "site c"
    assert cluster.jobs() == ["wrap"]
    assert of_run(run) == []


def test_a_login_node_over_ssh(run: Bench, cluster: Slurm) -> None:
    """Sites come up by srun there, and leave nothing in the queue."""
    with sshd(run.folder / "sshd", f"SLURM_CONF={cluster.folder / 'slurm.conf'}") as server:
        launchers = {
            site: server.launcher(
                *(sys.executable, run.folder / f"at-{site}"),
                kind="slurm",
                options=f'["--partition=part_{site}"]',
            )
            for site in "ab"
        }
        topology = written_with(run, launchers)
        run.isthmus("up", topology).check()
        assert sorted(cluster.jobs()) == ["isthmus-site-a", "isthmus-site-b"]
        run.isthmus("down", topology).check()
        assert cluster.jobs() == []
    assert of_run(run) == []


def is_child_of_srun(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and parent.name() == "srun"


def test_sites_whose_srun_is_killed_are_started_again(run: Bench, cluster: Slurm) -> None:
    topology = written(run)
    run.isthmus("up", topology).check()
    state = run.home / "up" / "test" / "keeper.json"
    found = [psutil.Process(pid) for pid in run.pids("--kill-on-bad-exit=1")]
    # An srun's child sees to the job's end. Once srun is dead it has another parent.
    for process in [each for each in found if not is_child_of_srun(each)]:
        process.kill()

    def are_up_again() -> bool:
        parts = json.loads(state.read_text())["parts"]
        return all(
            parts[f"site {site}"]["state"] == "up" and parts[f"site {site}"]["restarts"] == 1
            for site in SITES
        )

    run.wait_for("agents that are started again", are_up_again, 60)
    run.wait_for("one job a site", lambda: len(cluster.jobs()) == len(SITES), 60)
    run.isthmus("down", topology).check()
    assert cluster.jobs() == []
    assert of_run(run) == []


def test_before_the_time_limit_a_checkpoint_is_written_and_the_site_comes_back(
    run: Bench, cluster: Slurm
) -> None:
    topology = Path(written(run, steps=100_000, checkpoint="checkpoint: {every: 100000 steps}\n"))
    limited = topology.read_text().replace(
        '"--partition=part_c"', '"--partition=part_c", "--time=2"'
    )
    topology.write_text(limited)
    run.isthmus("up", str(topology)).check()
    job = run.folder / "job.yaml"
    run.isthmus("launch", str(job), "--run-id", "r", "--detach").check()

    def kinds() -> list[str]:
        events = run.isthmus("events", "r", "--json").check().envelope["data"]["events"]
        return [each["kind"] for each in events if each["site"] == "c"]

    run.wait_for("the return of the site", lambda: "site.returned" in kinds(), 240)
    log = (run.home / "up" / "test" / "logs" / "c.log").read_text()
    assert "waiting for the checkpoint of step" in log
    assert "no checkpoint" not in log
    run.isthmus("cancel", "r").check()
    run.isthmus("down", str(topology)).check()
    assert cluster.jobs() == []
    assert of_run(run) == []


def test_batch_jobs_leave_by_requeue_and_come_back(run: Bench, cluster: Slurm) -> None:
    """The site that is requeued has two nodes."""
    topology = written(
        run, steps=100_000, checkpoint="checkpoint: {every: 100000 steps, keep: 2}\n"
    )
    lines = Path(topology).read_text().splitlines()
    lines = [line.replace("nodes: 1", "nodes: 2") if "name: c," in line else line for line in lines]
    Path(topology).write_text("\n".join(lines) + "\n")
    coordinator = run.start(
        *("coordinator", "--topology", topology, "--bind", "127.0.0.1:0"),
        *("--state", str(run.folder / "coordinator"), "--json"),
    )
    announced = run.folder / "coordinator" / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, 60)
    address = json.loads(announced.read_text())["address"]
    rendered = run.isthmus(
        *("render", "slurm", topology, "--coordinator", address, "--json"),
        *("--out", str(run.folder / "rendered")),
    ).check()
    numbers = {}
    for path in map(Path, rendered.envelope["data"]["files"]):
        log = run.folder / f"{path.stem}.log"
        said = cluster.said(
            *("sbatch", "--parsable", f"--output={log}", str(path)), more=run.processes.env
        )
        numbers[path.stem] = said.strip()
    at = ("--coordinator", address)
    run.isthmus("launch", str(run.folder / "job.yaml"), "--run-id", "r", "--detach", *at).check()

    def kinds() -> list[str]:
        events = run.isthmus("events", "r", "--json", *at).check().envelope["data"]["events"]
        return [each["kind"] for each in events if each["site"] == "c"]

    def steps() -> int:
        status = run.isthmus("status", "r", "--json", *at).check().envelope["data"]
        return int(status["totals"].get("verified_steps", 0))

    run.wait_for("first steps", lambda: steps() > 5, 120)
    assert nodes_of_ranks(run) == {"part_a1", "part_b1", "part_c1", "part_c2"}
    # One agent, on the first node; the other has a supervisor.
    agents = [psutil.Process(pid).environ()["SLURMD_NODENAME"] for pid in run.pids("--site c")]
    assert set(agents) == {"part_c1"}
    cluster.said("scontrol", "requeue", numbers["c"])
    run.wait_for("the return of the site", lambda: "site.returned" in kinds(), 120)
    written_log = (run.folder / "c.log").read_text()
    assert "waiting for the checkpoint of step" in written_log
    assert "no checkpoint of step" not in written_log
    assert {"site.lost", "site.returning"} <= set(kinds())
    run.isthmus("cancel", "r", *at).check()
    cluster.said("scancel", *numbers.values())
    run.wait_for("an empty queue", lambda: cluster.jobs() == [], 60)
    coordinator.terminate()
    coordinator.communicate(timeout=60)
    run.wait_for("the end of all processes", lambda: of_run(run) == [], 30)


def test_a_batch_job_puts_itself_into_the_queue_before_its_time_limit(
    run: Bench, cluster: Slurm
) -> None:
    """A stand-in for the agent, which ends when it is told to."""
    described = load_topology(Path(written(run)).read_text(), "topology.yaml")
    python = run.folder / "python"
    python.write_text(
        "#!/bin/sh\ntrap 'echo told; exit 143' TERM\necho began\nsleep 600 & wait $!\n"
    )
    python.chmod(0o755)
    script = run.folder / "a.sbatch"
    script.write_text(
        slurm_script(
            described,
            described.site("a"),
            "127.0.0.1:7443",
            python=str(python),
            folder=str(run.folder / "at-a"),
            environment={},
        )
    )
    log = run.folder / "a.log"
    said = cluster.said("sbatch", "--parsable", "--time=1", f"--output={log}", str(script))
    run.wait_for("a second start", lambda: log.exists() and log.read_text().count("began") == 2)
    assert "told" in log.read_text()
    cluster.said("scancel", said.strip())
    run.wait_for("an empty queue", lambda: cluster.jobs() == [], 60)
    assert log.read_text().count("began") == 2


def test_the_manual_followed_literally(
    run: Bench,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the addresses and the number of accelerators are this machine's."""
    manual = Path(__file__).parents[2] / "docs" / "sites.md"
    section = manual.read_text().partition('<a id="two-sites-under-slurm">')[2]
    topology, commands = (
        textwrap.dedent(section.partition(f"   ```{kind}\n")[2].partition("   ```")[0])
        for kind in ("yaml", "sh")
    )
    for described, here in {
        "203.0.113.7": "127.0.0.2",
        "198.51.100.9": "127.0.0.3",
        "192.0.2.3:7443": "127.0.0.4:0",
        "accelerators_per_node: 8": "accelerators_per_node: 1",
    }.items():
        assert described in topology
        topology = topology.replace(described, here)
    run.write(topology, job_yaml(steps=3))
    monkeypatch.chdir(run.folder)
    with slurm(tmp_path_factory.mktemp("slurm") / "here", "eu=1", "us=1") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
        for command in commands.splitlines():
            if " down " in command:
                assert sorted(cluster.jobs()) == ["isthmus-site-eu", "isthmus-site-us"]
            run.isthmus(*command.removeprefix("isthmus ").split()).check()  # 0: it succeeded
        assert cluster.jobs() == []
