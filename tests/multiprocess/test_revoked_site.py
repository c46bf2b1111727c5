"""A run over mutual TLS goes on while the certificates of one site are revoked, and made anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.orchestrator.coordinator.journal import JournalReader
from tests.fakes.certified import DOMAIN, held_by, tls_options
from tests.multiprocess.harness import MTLS, bench, job_yaml, metrics_of, topology_yaml

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
]

DENIED = grpc.StatusCode.PERMISSION_DENIED
SESSION = "/isthmus.control.v1.Coordinator/Session"
EXCHANGE = "isthmus.exchange.v1"


def refusal(address: str, server: str, credentials: grpc.ChannelCredentials, method: str) -> str:
    """Return why a call is refused that says next to nothing."""
    options = tls_options(f"{server}.{DOMAIN}")
    with grpc.secure_channel(address, credentials, options=options) as channel:
        call: Any = channel.stream_stream(method)
        answers = call(iter([b""]), timeout=20)
        assert answers.code() is DENIED, (method, answers.code(), answers.details())
        return str(answers.details())


def test_a_site_is_shut_out_in_mid_run_and_let_in_with_new_certificates(tmp_path: Path) -> None:
    with bench(tmp_path, MTLS) as run:
        topology = topology_yaml([(1, 1)] * 3, emulate=False, detect_within="5s", min_sites=1)
        job = run.write(topology, job_yaml(steps=1_000_000, codec="int8"))
        path, state = run.folder / "topology.yaml", run.folder / "coordinator"
        coordinator = run.start(
            *("coordinator", "--topology", str(path), "--state", str(state)),
            *("--bind", "127.0.0.1:0"),
        )
        announced = state / "coordinator.json"
        run.wait_for("the coordinator", announced.exists)
        address = json.loads(announced.read_text())["address"]

        def agent(site: str) -> Any:  # noqa: ANN401 - a process
            return run.start(
                *("agent", "--site", site, "--coordinator", address, "--topology", str(path)),
                *("--state", str(run.folder / f"agent-{site}")),
            )

        agents = {site: agent(site) for site in "abc"}
        launched = run.start("launch", str(job), "--coordinator", address, "--run-id", "r")
        folder = state / "runs" / "r"

        def steps(site: str) -> list[int]:
            if not (folder / "metrics.jsonl").exists():
                return []
            of_site = (each for each in metrics_of(folder) if each["site"] == site)
            return [each["step"] for each in of_site if each["kind"] == "step"]

        def more_steps(*sites: str) -> None:
            before = {site: len(steps(site)) for site in sites}
            run.wait_for("steps", lambda: all(len(steps(s)) > before[s] + 5 for s in sites))

        def status() -> dict[str, Any]:
            found: dict[str, Any] = run.isthmus("status", "r", "--json").check().envelope["data"]
            return found

        more_steps("a", "b", "c")
        certs, stolen = run.folder / "certs", run.folder / "stolen"
        shutil.copytree(certs, stolen)

        run.isthmus("certs", "revoke", "c", "--folder", str(certs)).check()
        run.wait_for("the drop", lambda: status()["members"] == ["a", "b"])
        dropped = status()
        assert dropped["sites"][2]["state"] == "DROPPED"
        said = "site c was dropped, and the run continues without it: its certificate was revoked"
        assert said in str(dropped["notes"])
        _, err = agents["c"].communicate(timeout=60)
        assert agents["c"].returncode == 8, err
        (error,) = (line for line in err.splitlines() if line.startswith("error: "))
        assert error.startswith("error: the coordinator refused this agent: "), err
        assert error.endswith(" was revoked"), err
        run.wait_for("c's end", lambda: len(run.pids("isthmus.sites.gateway")) == 2)
        more_steps("a", "b")

        why = "the certificate of the {} of site c was revoked"
        thief = held_by(stolen, "c.agent")
        assert refusal(address, "coordinator", thief, SESSION) == why.format("agent")
        thief = held_by(stolen, "c.gateway")
        for site, port in gateways_of(state, "a", "b").items():
            for service, method, at in (
                ("State", "Read", port),
                ("Exchange", "Hello", port),
                ("Exchange", "Push", port),
            ):
                where, server = f"127.0.0.1:{at}", f"gateway.{site}.site"
                called = f"/{EXCHANGE}.{service}/{method}"
                assert refusal(where, server, thief, called) == why.format("gateway"), called

        again = run.isthmus("certs", "renew", "c.agent", "--folder", str(certs))
        assert "was revoked: `isthmus certs issue --force c.agent`" in again.check(3).err
        made = ("certs", "issue", "--force", "c.agent", "c.gateway", "--folder", str(certs))
        run.isthmus(*made).check()
        agents["c"] = agent("c")
        run.wait_for("c's agent", lambda: status()["sites"][2]["state"] != "ABSENT")
        run.isthmus("sites", "add", "c", "r").check()
        run.wait_for("the return", lambda: status()["members"] == ["a", "b", "c"])
        more_steps("a", "b", "c")
        for site in "ab":
            taken = steps(site)
            assert taken == [*range(1, len(taken) + 1)], "nothing was done again"

        run.isthmus("cancel", "r").check()
        launched.communicate(timeout=60)
        for process in (*agents.values(), coordinator):
            process.terminate()
        run.wait_for_nothing_left(30)


def gateways_of(state: Path, *sites: str) -> dict[str, int]:
    """Return the first port at which each site's gateway listens."""
    with JournalReader(state) as journal:
        events = [each for each in journal.events("r") if each.kind == "site.prepared"]
    ports = {each.site: each.detail["gateways"][0].rpartition(":")[2] for each in events}
    return {site: int(ports[site]) for site in sites}
