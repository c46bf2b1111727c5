"""`isthmus up` and `down`: agents behind a real sshd, and what goes wrong on the way to them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.sshd import Sshd, nobodys, sshd
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as made:
        yield made


def written(run: Bench, launchers: dict[str, str]) -> str:
    """Write the topology of two sites on addresses of their own; return its path."""
    text = topology_yaml([(1, 1), (1, 1)], emulate=False, addresses=["127.0.0.2", "127.0.0.3"])
    for site, launcher in launchers.items():
        text = text.replace(f"name: {site}, ", f"name: {site}, launcher: {launcher}, ")
    run.write(text, job_yaml(steps=3))
    return str(run.folder / "topology.yaml")


def of_run(run: Bench) -> list[int]:
    """Return the processes whose command line or folder is the run's, sshd's apart."""
    found = []
    for process in psutil.process_iter():
        try:
            place, words = process.cwd(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_ours = str(run.folder) in place or str(run.folder) in words
        if is_ours and "sshd" not in process.name() and process.pid != os.getpid():
            found.append(process.pid)
    return found


def credentials(run: Bench) -> list[Path]:
    return list(run.folder.rglob("credentials"))


@pytest.mark.exhaustive
def test_agents_whose_sshd_session_is_killed_end_and_are_started_again(
    run: Bench, server: Sshd
) -> None:
    launchers = {site: server.launcher(sys.executable, run.folder / f"at-{site}") for site in "ab"}
    topology = written(run, launchers)
    run.isthmus("up", topology).check()
    state = run.home / "up" / "test" / "keeper.json"
    first = [pid for pid in of_run(run) if "--site" in psutil.Process(pid).cmdline()]
    for session in server.sessions():
        session.kill()

    def agents_are_others() -> bool:
        parts = json.loads(state.read_text())["parts"]
        return (
            not any(psutil.pid_exists(pid) for pid in first)
            and all(parts[f"site {site}"]["state"] == "up" for site in "ab")
            and all(parts[f"site {site}"]["restarts"] == 1 for site in "ab")
        )

    assert len(first) == 2
    run.wait_for("agents that are started again", agents_are_others, 60)
    run.isthmus("down", topology).check()
    assert of_run(run) == []


@pytest.mark.exhaustive
def test_over_tls_with_the_coordinator_at_a_site(run: Bench, server: Sshd) -> None:
    """Each site gets its own keys, and those only."""
    launchers = {site: server.launcher(sys.executable, run.folder / f"at-{site}") for site in "ab"}
    topology = Path(written(run, launchers))
    described = topology.read_text().replace("mode: insecure", "mode: mtls")
    topology.write_text(f'{described}coordinator: {{site: a, bind: "127.0.0.4:0"}}\n')
    certs = str(run.folder / "certs")
    run.isthmus("certs", "init", str(topology), "--folder", certs).check()
    run.isthmus("up", str(topology)).check()
    for site in "ab":
        names = {path.name for path in (run.folder / f"at-{site}" / "credentials").iterdir()}
        roles = [f"{site}.agent", f"{site}.gateway"]
        assert names == {"ca.pem", *(f"{role}.{kind}" for role in roles for kind in ("pem", "key"))}
    assert (run.folder / "at-a" / "coordinator" / "state").is_dir()
    launched = run.isthmus("launch", str(run.folder / "job.yaml"), "--json").check()
    assert launched.envelope["data"]["verified_steps"] == 1 + 3
    run.isthmus("down", str(topology)).check()
    assert of_run(run) == []
    assert credentials(run) == []


@pytest.mark.exhaustive
def test_a_user_that_is_not_root_behind_a_jump_host(
    run: Bench, server: Sshd, tmp_path: Path
) -> None:
    """`nobody` has a home and a Python that it may read: the system's, with our packages."""
    account = pwd.getpwnam("nobody")
    with nobodys(tmp_path / "nobodys") as (theirs, home, python):
        at = home / "site"
        jump = f"{server.user}@127.0.0.1:{server.port}"
        # One key and one file of known hosts for both: the jump host's own are the same.
        launcher = theirs.launcher(str(python), at)
        known = theirs.folder / "known"
        known.write_text(known.read_text() + (server.folder / "known").read_text())
        keys = server.folder / "authorized_keys"
        keys.write_bytes(keys.read_bytes() + (theirs.folder / "key.pub").read_bytes())
        behind = f"{launcher[:-1]}, jump: {jump}}}"
        # Both train on the standard library's sources: the same Python.
        topology = written(run, {"a": behind, "b": f"{{kind: local, python: {python}}}"})
        run.isthmus("up", topology).check()
        (agent,) = (
            process
            for process in map(psutil.Process, run_by(account.pw_uid))
            if "--site" in process.cmdline()
        )
        assert agent.cwd() == str(at)
        secret = at / "credentials" / "token"
        assert (secret.stat().st_uid, secret.stat().st_mode & 0o077) == (account.pw_uid, 0)
        assert len(server.sessions()) == 1
        launched = run.isthmus("launch", str(run.folder / "job.yaml"), "--json").check()
        assert launched.envelope["data"]["verified_steps"] == 1 + 3
        run.isthmus("down", topology).check()
        assert run_by(account.pw_uid) == []
        assert not secret.exists()
        assert server.sessions() == []


def run_by(uid: int) -> list[int]:
    """Return the processes of a user, sshd's apart."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == uid and "sshd" not in process.name():
                found.append(process.pid)
    return found


@pytest.mark.exhaustive
def test_a_site_of_two_machines_over_ssh_and_tls(run: Bench, server: Sshd) -> None:
    inner = json.dumps(server.inner())
    launcher = server.launcher(sys.executable, run.folder / "at-a", options=inner)
    topology = Path(written(run, {"a": launcher}))
    described = topology.read_text().replace("mode: insecure", "mode: mtls")
    described = described.replace("nodes: 1", "nodes: 2, hosts: [127.0.1.1, 127.0.1.2]", 1)
    topology.write_text(described.replace(", address: 127.0.0.2", "", 1))
    (run.folder / "job.yaml").write_text(job_yaml(steps=100_000))
    certs = str(run.folder / "certs")
    run.isthmus("certs", "init", str(topology), "--folder", certs).check()
    run.isthmus("up", str(topology)).check()
    launched = ("launch", str(run.folder / "job.yaml"), "--run-id", "r", "--detach")
    run.isthmus(*launched).check()

    def events() -> str:
        return run.isthmus("events", "r", "--json").check().out

    run.wait_for("the run", lambda: "run.active" in events(), 60)
    processes = [psutil.Process(pid) for pid in of_run(run)]
    (supervisor,) = (
        each for each in processes if each.cmdline()[1:] == ["-P", "-m", "isthmus.sites.node"]
    )
    below = supervisor.children(recursive=True)
    (ssh,) = (each for each in processes if each.name() == "ssh")
    secrets = _paths(below[0].environ()["ISTHMUS_KEY"])
    assert [path.name for path in secrets] == ["a.gateway.key"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    ssh.kill()  # it leaves what it has started, which has to see that its stream has ended
    psutil.wait_procs([supervisor, *below], 20)
    assert not any(each.is_running() for each in [supervisor, *below])
    assert not any(path.exists() for path in secrets)
    run.wait_for("the loss", lambda: "NODE_LOST" in events(), 60)
    assert "node 1 of site a (127.0.1.2)" in events()
    run.isthmus("down", str(topology)).check()
    assert of_run(run) == []
    assert server.sessions() == []


def _paths(pattern: str) -> list[Path]:
    """Return the files that a certificate's variable means."""
    folder, name = Path(pattern).parent, Path(pattern).name
    return list(folder.glob(name.replace("{name}", "*")))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "reason", "cure"),
    [
        ({"key": "foreign"}, "permission_denied", "ssh-copy-id"),
        ({"known": "nobody_known"}, "host_key_unknown", "ssh-keyscan"),
        ({"python": "/nowhere/python3"}, "python_missing", "launcher.python"),
        ({"python": "/usr/bin/python3"}, "isthmus_missing", "pip install isthmus"),
    ],
)
def test_what_goes_wrong_at_a_site_is_named_with_its_cure(
    run: Bench, server: Sshd, change: dict[str, str], reason: str, cure: str
) -> None:
    options = {"python": sys.executable, **change}
    launcher = server.launcher(folder=run.folder / "at-b", **options)
    failed = run.isthmus("up", written(run, {"b": launcher}), "--json").check(4)
    error = failed.envelope["error"]
    assert error["code"] == "SITE_NOT_STARTED"
    (part,) = error["where"]["parts"]
    assert (part["part"], part["reason"]) == ("site b", reason), part
    assert cure in part["cure"]
    assert part["cure"] in failed.err
    assert of_run(run) == []


@pytest.mark.exhaustive
def test_a_host_that_nobody_is_at_is_named(run: Bench) -> None:
    launcher = "{kind: ssh, host: 127.0.0.1, port: 1}"
    failed = run.isthmus("up", written(run, {"b": launcher}), "--json").check(4)
    (part,) = failed.envelope["error"]["where"]["parts"]
    assert part["reason"] == "host_unreachable", part
    assert of_run(run) == []


@pytest.mark.exhaustive
def test_a_site_by_srun(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for srun, which carries stdin and output as the real one does."""
    programs = run.folder / "programs"
    programs.mkdir()
    srun = programs / "srun"
    srun.write_text(
        f'#!/bin/sh\necho "$@" >> {run.folder}/asked\n'
        'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    topology = written(run, {"b": '{kind: slurm, options: ["--partition=gpu"]}'})
    run.isthmus("up", topology).check()
    assert "--job-name=isthmus-site-b --partition=gpu" in (run.folder / "asked").read_text()
    run.isthmus("down", topology).check()
    assert of_run(run) == []


@pytest.mark.exhaustive
def test_a_keeper_that_is_killed_takes_everything_with_it(run: Bench) -> None:
    topology = written(run, {})
    run.isthmus("up", topology).check()
    state = json.loads((run.home / "up" / "test" / "keeper.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    run.wait_for("end of all processes", lambda: of_run(run) == [], 30)
    assert credentials(run) == []
    run.isthmus("up", topology).check()
    run.isthmus("down", topology).check()
    assert of_run(run) == []


@pytest.mark.exhaustive
def test_two_that_start_it_at_once_both_find_it_up(run: Bench) -> None:
    topology = written(run, {})
    commands = [run.start("up", topology, "--json") for _ in range(2)]
    told = [json.loads(each.communicate(timeout=60)[0]) for each in commands]
    assert [each["status"] for each in told] == ["ok", "ok"], told
    assert len({each["data"]["coordinator"] for each in told}) == 1
    run.isthmus("down", topology).check()
    assert of_run(run) == []


def test_who_interrupts_it_before_anything_is_up_leaves_nothing(run: Bench) -> None:
    command = run.start("up", written(run, {}), "--json")

    def keepers() -> list[psutil.Process]:
        return psutil.Process(command.pid).children()

    run.wait_for("its keeper", lambda: keepers() != [], 30)
    command.send_signal(signal.SIGTERM)
    envelope = json.loads(command.communicate(timeout=60)[0])
    assert envelope["exit_code"] == 143
    assert of_run(run) == []
