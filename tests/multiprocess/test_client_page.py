"""Every code block of docs/client.md runs, and so does the example notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "client.md"
SCRIPT = """\
import argparse
import torch
import isthmus

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
site = isthmus.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
site.attach(model, optimizer)
generator = torch.Generator().manual_seed(site.global_rank)
for _ in range(parser.parse_args().steps):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    site.log(loss=loss)
print("the last words", flush=True)
site.leave()
"""


@pytest.mark.exhaustive
def test_the_blocks_of_the_page_run(run: Bench) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    (run.folder / "train.py").write_text(SCRIPT)
    run.write(topology_yaml([(1, 1)] * 2, emulate=False), job_yaml(steps=50))
    served = run.folder / "served"
    served.mkdir()
    (served / "topology.yaml").write_text((run.folder / "topology.yaml").read_text())
    up = run.isthmus("up", str(served / "topology.yaml"), "--json").check()
    address = up.envelope["data"]["coordinator"]
    text = "\n".join(blocks).replace("coordinator.example:7443", address)
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=run.folder,
        env={**run.processes.env, "ISTHMUS_HOME": str(run.home)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    out = done.stdout
    assert done.returncode == 0, f"{out}\n{done.stderr}\n{run.logs()}"
    lines = out.splitlines()
    assert any(line.startswith("SUCCEEDED 3 ") for line in lines), out
    assert {"site-1 ENDED 3", "site-2 ENDED 3", "the last words", "CANCELLED"} <= set(lines), out
    assert (run.folder / "report.html").stat().st_size > 10_000
    run.isthmus("down", str(served / "topology.yaml")).check()


@pytest.mark.exhaustive
def test_a_script_runs_without_yaml(run: Bench) -> None:
    script = run.folder / "train.py"
    script.write_text(SCRIPT)
    done = run.isthmus("run", str(script), "--sites", "3", "--json", "--", "--steps", "5").check()
    assert [site["step"] for site in done.envelope["data"]["sites"]] == [5, 5, 5]
    job = run.isthmus("events", "--json").check().envelope["data"]["events"][0]["detail"]
    assert run.isthmus("validate", job["job_source"]).check().code == 0


@pytest.mark.exhaustive
def test_the_notebook_runs(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    folder = ROOT / "examples" / "two_sites"
    for name, value in {**run.processes.env, "ISTHMUS_HOME": str(run.home)}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(folder / "launch.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.get("data", {}) for output in outputs]
    assert any("'SUCCEEDED', 256" in each.get("text/plain", "") for each in shown), shown
    assert any("<iframe" in each.get("text/html", "") for each in shown)
