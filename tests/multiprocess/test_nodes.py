"""Sites of several machines: each has a supervisor, an address of its own, and may be lost."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from isthmus.protos.catalogue import ExitCode
from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(400)]

HOSTS = ("127.0.1.1", "127.0.1.2")
OTHER = "127.0.2.1"


def several_machines(sites: list[tuple[int, int]], **rest: object) -> str:
    """Return sites of which `a` has machines of its own, and the others addresses."""
    written = topology_yaml(sites, emulate=False, rtt="4ms", **rest)  # type: ignore[arg-type]
    return written.replace("name: a,", f"name: a, hosts: [{', '.join(HOSTS)}],")


def supervised(run: Bench) -> tuple[int, list[int]]:
    """Return the only supervisor, and what is below it."""
    (supervisor,) = run.pids("-m isthmus.sites.node ")
    return supervisor, [each.pid for each in psutil.Process(supervisor).children(recursive=True)]


@pytest.mark.exhaustive
def test_two_nodes_train_what_one_process_would(run: Bench) -> None:
    """Over TLS; tolerance as in test_same_training.py."""
    steps = 50
    topology = several_machines([(2, 2), (1, 3)]).replace("mode: insecure", "mode: mtls")
    topology = topology.replace("name: b,", f"name: b, hosts: [{OTHER}],")
    job = job_yaml(steps=steps, codec="fp32", global_batch=13)
    path = run.write(topology, job)
    certs = str(run.folder / "certs")
    run.isthmus("certs", "init", str(run.folder / "topology.yaml"), "--folder", certs).check()
    process = run.start("launch", str(path), "--json")
    metrics = "runs/*/metrics.jsonl"
    run.wait_for(
        "first steps",
        lambda: any('"kind": "step"' in each.read_text() for each in run.home.glob(metrics)),
    )
    listening = {
        each.laddr.ip.removeprefix("::ffff:")
        for pid in run.pids()
        for each in psutil.Process(pid).net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    }
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    assert {*HOSTS, OTHER} <= listening <= {*HOSTS, OTHER, "127.0.0.1"}

    losses, alone = run.losses(), train_alone(load_job(job, "job.yaml"), run.folder).losses
    assert len(losses) == steps
    worst = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    assert worst < 1e-5, f"losses differ by {worst:.2e} relative"
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
@UNDER_BOTH_SECURITIES
def test_a_node_that_is_killed_is_its_sites_loss(run: Bench) -> None:
    topology = several_machines(
        [(2, 1), (1, 1), (1, 1)], min_sites=2, max_restarts=0, detect_within="6s"
    )
    job = run.write(topology, job_yaml(steps=60))
    process = run.start("launch", str(job), "--json")

    def steps() -> int:
        folders = list((run.home / "runs").glob("*/metrics.jsonl"))
        if not folders:
            return 0
        return sum(each["kind"] == "step" and each["site"] == "b" for each in run.metrics())

    run.wait_for("first steps", lambda: steps() > 3)
    supervisor, below = supervised(run)
    assert len(below) >= 3, "gateway, torchrun and rank"
    kill(supervisor)
    (agent,) = run.pids("-m isthmus.sites.agent", "--site a")
    run.wait_for("the end of the site", lambda: not run.children(agent), 30)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.WITH_LOSSES, f"{out}\n{err}\n{run.logs()}"
    assert not any(map(psutil.pid_exists, below))
    assert steps() == 60
    events = run.isthmus("events", "--json").check().out
    assert "NODE_LOST" in events
    assert "node 1 of site a (127.0.1.2) was killed by SIGKILL" in events
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
def test_a_node_that_waits_for_its_agent_takes_part(run: Bench) -> None:
    """As pods do: the agent dials it inside the site, and other sites dial what `hosts` says."""
    inside, outside, port = ("127.0.1.1", "127.0.1.2"), ("127.0.1.11", "127.0.1.12"), 23250
    topology = topology_yaml(
        [(2, 1), (1, 1)],
        emulate=False,
        rtt="4ms",
        detect_within="6s",
        addresses=[inside[0], OTHER],
    ).replace(f"address: {inside[0]}", "ports: 23200-23209")
    topology = topology.replace("name: a,", f"name: a, hosts: [{', '.join(outside)}],")
    job = run.write(topology.replace("mode: insecure", "mode: mtls"), job_yaml(steps=10))
    path, state, certs = run.folder / "topology.yaml", run.folder / "state", run.folder / "certs"
    run.isthmus("certs", "init", str(path), "--folder", str(certs)).check()
    waits = subprocess.Popen(
        [
            *(sys.executable, "-m", "isthmus.sites.node.serve", "--site", "a"),
            *("--bind", f"{inside[1]}:{port}"),
        ],
        env={
            **run.processes.env,
            "ISTHMUS_CA": f"{certs}/ca.pem",
            "ISTHMUS_CERT": f"{certs}/{{name}}.pem",
            "ISTHMUS_KEY": f"{certs}/{{name}}.key",
        },
    )
    try:
        run.start(
            "coordinator", "--topology", str(path), "--state", str(state), "--bind", "127.0.0.4:0"
        )
        announced = state / "coordinator.json"
        run.wait_for("the coordinator", announced.exists, 60)
        address = json.loads(announced.read_text())["address"]
        nodes = [word for host in inside for word in ("--node", f"{host}:{port}")]
        for site, more in (("a", (*nodes, "--bind", "0.0.0.0")), ("b", ())):
            run.start(
                *("agent", "--site", site, "--coordinator", address, *more),
                *("--topology", str(path), "--state", str(run.folder / f"agent-{site}")),
            )
        done = run.isthmus("launch", str(job), "--coordinator", address, "--json").check()
        assert done.envelope["data"]["verified_steps"] == 1 + 10
        below = psutil.Process(waits.pid).children(recursive=True)
        run.wait_for("the supervisor's end", lambda: not any(each.is_running() for each in below))
    finally:
        waits.terminate()
        waits.wait(60)
