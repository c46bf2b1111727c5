"""A run over mutual TLS, one site behind NAT: it trains as one process does.

And nothing listens beyond what is configured.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import psutil
import pytest

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.multiprocess.harness import Bench, job_yaml, losses_of, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SITES = [(1, 1), (1, 2)]
STEPS = 100
COMPARED_STEPS = 50
"""As tests/multiprocess/test_same_training.py has them, which says how near losses are."""

PORTS = (23100, 23149)


def listening(run: Bench) -> dict[tuple[str, int], str]:
    """Return where the run's processes listen, and which does: its module, else what torch runs."""
    found = {}
    for pid in run.pids():
        process = psutil.Process(pid)
        modules = [each for each in process.cmdline() if each.startswith("isthmus.")]
        for each in process.net_connections(kind="inet"):
            if each.status == psutil.CONN_LISTEN:
                host = each.laddr.ip.removeprefix("::ffff:")
                found[host, each.laddr.port] = modules[0] if modules else "rank"
    return found


def test_a_run_of_two_sites_over_mutual_tls(run: Bench) -> None:
    topology = topology_yaml(SITES, emulate=False, addresses=["127.0.0.2", "127.0.0.3"])
    topology = topology.replace(
        "address: 127.0.0.2", f"address: 127.0.0.2, ports: {PORTS[0]}-{PORTS[1]}"
    )
    topology = topology.replace("address: 127.0.0.3", "inbound: false")
    # 13 sequences a step over 3 ranks: nothing divides, so the weights have to be right.
    text = job_yaml(steps=STEPS, global_batch=13)
    job = run.write(topology.replace("mode: insecure", "mode: mtls"), text)
    topology_path, state = run.folder / "topology.yaml", run.folder / "coordinator"
    certs = str(run.folder / "certs")
    run.isthmus("certs", "init", str(topology_path), "--folder", certs).check()
    run.start(
        *("coordinator", "--topology", str(topology_path), "--state", str(state)),
        *("--bind", "127.0.0.4:0"),
    )
    announced = state / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, 30)
    address = json.loads(announced.read_text())["address"]
    # Site b has the topology, and a token for its certificates.
    there, token = run.folder / "there", run.folder / "b.token"
    there.mkdir()
    (there / "topology.yaml").write_text(topology_path.read_text())
    made = ("certs", "token", "b", "--coordinator", address, "--folder", certs, "--out", str(token))
    run.isthmus(*made).check()
    assert token.stat().st_mode & 0o077 == 0
    for site, path, more in (
        ("a", topology_path, ()),
        ("b", there / "topology.yaml", ("--join-token", str(token))),
    ):
        run.start(
            *("agent", "--site", site, "--coordinator", address, *more),
            *("--topology", str(path), "--state", str(run.folder / f"agent-{site}")),
        )
    launched = run.start("launch", str(job), "--coordinator", address, "--json")
    metrics = state / "runs"

    def steps() -> bool:
        return any('"kind": "step"' in path.read_text() for path in metrics.rglob("metrics.jsonl"))

    run.wait_for("steps", steps)

    found = listening(run)
    inside = {what for (host, _), what in found.items() if host == "127.0.0.1"}
    # torchrun's store, and Gloo's pairs.
    assert inside == {"isthmus.sites.node.launcher", "isthmus.sites.node.rank"}, found
    outside = {(host, port): what for (host, port), what in found.items() if host != "127.0.0.1"}
    gateway = sorted(where for where, what in outside.items() if what == "isthmus.sites.gateway")
    port = gateway[0][1]
    assert gateway == [("127.0.0.2", port)]
    assert PORTS[0] <= port < PORTS[1]
    coordinator_host, _, coordinator_port = address.rpartition(":")
    assert outside == {
        **dict.fromkeys(gateway, "isthmus.sites.gateway"),
        (coordinator_host, int(coordinator_port)): "isthmus.orchestrator.coordinator",
    }
    status = run.isthmus("status", "--json").check()
    assert status.envelope["data"]["state"] in {"ACTIVE", "STOPPING", "SUCCEEDED"}
    out, err = launched.communicate(timeout=120)
    assert launched.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    data = json.loads(out)["data"]
    assert data["verified_steps"] == 1 + STEPS
    folder = state / "runs" / data["run_id"]
    alone = train_alone(load_job(text, "job.yaml"), run.folder).losses[:COMPARED_STEPS]
    losses = losses_of(folder)
    assert len(losses) == STEPS
    assert losses[:COMPARED_STEPS] == pytest.approx(alone, rel=1e-5)
    assert losses[-1] < losses[0] - 0.3
    for folder in (state, run.folder / "agent-a", run.home / "runs"):
        assert unprotected(folder) == []


@pytest.mark.exhaustive
def test_a_local_run_over_mutual_tls(run: Bench) -> None:
    """Emulated links, and all processes started by launch."""
    path = run.write(topology_yaml(SITES).replace("insecure", "mtls"), job_yaml(steps=3))
    topology = str(run.folder / "topology.yaml")
    run.isthmus("certs", "init", topology, "--folder", str(run.folder / "certs")).check()
    result = run.isthmus("launch", str(path), "--json").check()
    assert result.envelope["data"]["verified_steps"] == 1 + 3
    run.isthmus("status").check()
    run.wait_for_nothing_left(20)


def unprotected(folder: Path) -> list[str]:
    """Return what others can read below a folder, through folders that they may enter."""
    if not folder.stat().st_mode & 0o007:
        return []
    found = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            found += unprotected(path)
        elif mode & 0o007:
            found.append(str(path))
    return found
