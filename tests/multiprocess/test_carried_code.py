"""A job's files and data are carried to sites that have none of them; what came is told."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sshd import Sshd, nobodys, sshd
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml
from tests.multiprocess.test_up import credentials, of_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = """\
import json, os, sys
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
import isthmus
from beside import RATE

site = isthmus.join()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer)
generator = torch.Generator().manual_seed(site.global_rank)
for _ in range(start, start + 2):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
found = {
    "site": site.name, "rate": RATE, "start": start, "text": Path("data/text.txt").read_text(),
    "folder": os.getcwd(), "tool": os.access("tool.sh", os.X_OK), "ignored": Path("big.pt").exists(),
    "fetched": Path(os.environ["ISTHMUS_DATA"], "corpus.bin").read_text(),
    "flag": os.environ.get("FROM_PROLOGUE"),
    "left_over": sorted(name for name in os.environ if name.startswith(("SLURM_", "PET_"))),
}
print(json.dumps(found), flush=True)
site.leave()
"""
CORPUS = "corpus" * 1000
PLACES = ["127.0.0.2", "127.0.0.3"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd", environment="SLURM_PROCID=7") as made:
        yield made


def project(run: Bench, launchers: Mapping[str, str]) -> Path:
    """Write a project, and a topology of two sites behind sshd that have nothing of it."""
    folder = run.folder / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "text.txt").write_text("words")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("RATE = 0.1\n")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / "big.pt").write_bytes(bytes(1 << 20))
    (folder / ".gitignore").write_text("*.pt\n")
    corpus = run.folder / "store" / "corpus.bin"
    corpus.parent.mkdir()
    corpus.write_text(CORPUS)
    text = topology_yaml([(1, 1)] * 2, emulate=False, addresses=PLACES)
    for site, launcher in launchers.items():
        more = f"launcher: {launcher}, prologue: [export FROM_PROLOGUE={site}], "
        text = text.replace(f"name: {site}, ", f"name: {site}, {more}")
    (folder / "topology.yaml").write_text(text)
    digest = hashlib.sha256(CORPUS.encode()).hexdigest()
    (folder / "job.yaml").write_text(
        job_yaml(entrypoint="train.py")
        + f"data: [{{url: 'file://{corpus}', digest: 'sha256:{digest}'}}]\n"
        + f"checkpoint: {{every: 1 steps, to: {run.folder}/stored}}\n"
    )
    return folder


def found(run: Bench, run_id: str) -> dict[str, dict[str, Any]]:
    logs = run.isthmus("logs", run_id, "--json").check().envelope["data"]["lines"]
    lines = [json.loads(line["text"]) for line in logs if line["text"].startswith('{"site"')]
    return {each["site"]: each for each in lines}


def test_two_sites_over_ssh_train_what_they_have_nothing_of(run: Bench, server: Sshd) -> None:
    """From `up` to `down`; a second launch carries the line that has changed, and is resumed."""
    folder = project(
        run, {site: server.launcher(sys.executable, run.folder / f"at-{site}") for site in "ab"}
    )
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    topology = str(folder / "topology.yaml")
    up = run.isthmus("up", topology, "--json").check()
    assert {each["state"] for each in up.envelope["data"]["sites"]} == {"up"}
    again = run.isthmus("up", topology, "--json").check()
    assert again.envelope["data"]["coordinator"] == up.envelope["data"]["coordinator"]
    secrets = [path for folder in credentials(run) for path in folder.iterdir()]
    assert secrets
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)

    first = run.isthmus("launch", str(folder / "job.yaml"), "--json").check().envelope["data"]
    assert first["verified_steps"] == 1 + 2
    told = found(run, first["run_id"])
    assert told.keys() == {"a", "b"}
    for site, each in told.items():
        assert Path(each["folder"]).is_relative_to(run.folder / f"at-{site}")
        assert (each["text"], each["rate"], each["tool"]) == ("words", 0.1, True)
        assert each["start"] == 0
        assert (each["fetched"], each["flag"]) == (CORPUS, site)
        assert (each["ignored"], each["left_over"]) == (False, [])

    (folder / "beside.py").write_text("RATE = 0.2\n")
    begun_s = time.monotonic()
    started = run.start("launch", str(folder / "job.yaml"), "--detach", "--json", "--resume")
    out, err = started.communicate(timeout=60)
    carried_s = time.monotonic() - begun_s
    assert started.returncode == 0, f"{out}\n{err}"
    assert "carrying 11B: 1 of 7 files, beside.py" in err
    assert "line 1: +RATE = 0.2" in err
    assert f"resumes {first['run_id']} after step 2: " in err
    second = json.loads(out)["data"]["run_id"]
    run.isthmus("wait", second).check()
    assert {(each["rate"], each["start"]) for each in found(run, second).values()} == {(0.2, 2)}
    run.isthmus("down", topology).check()
    assert carried_s < 20, "most of it is the start of the command"
    assert of_run(run) == []
    assert credentials(run) == []
    assert list(run.folder.rglob("tether.lock")) == []
    assert server.sessions() == []
    run.isthmus("down", topology, "--json").check(8)

    # Its runs can be looked at as long as their files are here.
    page = run.folder / "report.html"
    run.isthmus("report", second, "--out", str(page)).check()
    assert "changed since run " + first["run_id"] in page.read_text()
    assert "line 1: +RATE = 0.2" in page.read_text()
    listed = run.isthmus("status", "--all", "--json").check().envelope["data"]["runs"]
    assert {(each["run_id"], each["state"]) for each in listed} == {
        (first["run_id"], "SUCCEEDED"),
        (second, "SUCCEEDED"),
    }
    assert "run.ended" in run.isthmus("events").check().out
    removed = run.isthmus("runs", "remove", second, "-y", "--json").check().envelope["data"]
    assert len(removed["runs"][0]["folders"]) == 2
    run.isthmus("status", second, "--json").check(2)


@pytest.mark.exhaustive
def test_an_account_that_may_read_nothing_here_trains(run: Bench, tmp_path: Path) -> None:
    """`nobody` is at both sites, and the project is another user's."""
    with nobodys(tmp_path / "nobodys") as (theirs, home, python):
        places = {site: home / site for site in "ab"}
        folder = project(
            run, {site: theirs.launcher(str(python), at) for site, at in places.items()}
        )
        job = folder / "job.yaml"
        corpus = home / "corpus.bin"  # what is fetched has to be readable by who fetches it
        corpus.write_text(CORPUS)
        corpus.chmod(0o644)
        job.write_text(job.read_text().replace(str(run.folder / "store"), str(home)))
        run.isthmus("up", str(folder / "topology.yaml")).check()
        done = run.isthmus("launch", str(job), "--json").check().envelope["data"]
        told = found(run, done["run_id"])
        for site, at in places.items():
            assert Path(told[site]["folder"]).is_relative_to(at)
            assert (told[site]["text"], told[site]["fetched"]) == ("words", CORPUS)
        run.isthmus("down", str(folder / "topology.yaml")).check()
