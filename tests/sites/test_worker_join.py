"""Joining and leaving: with nobody, with a gateway, and what an orderly end is."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.protos.errors import ConfigMismatchError, IsthmusError, StaleGenerationError
from isthmus.sites.local.rank_messages import Reduced
from isthmus.sites.worker.api.environment import Environment, NotLaunchedError
from isthmus.sites.worker.api.joining import join
from isthmus.sites.worker.exchange.gateway_link import GatewayLink
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program, environment, results, run_ranks
from tests.sites import worker_programs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "sites" / "scripts" / "two_lines.py"
SCRIPT_S = 90.0
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TEST_STORE"}

multiprocess = [pytest.mark.slow, pytest.mark.multiprocess]


def run_script(
    *command: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run python with these arguments, and only this of isthmus in the environment."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("ISTHMUS")}
    env = {**inherited, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        env={**env, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
        check=False,
    )


def run_as_rank(
    folder: Path, *command: str
) -> tuple[subprocess.CompletedProcess[str], FakeGateways]:
    """Run python with these arguments as the only rank of a run's only site."""
    with FakeGateways(folder, [1]) as gateways:
        launched = environment(folder, 0, 0, [1], gateways.path(0))
        alone = {name: text for name, text in launched.items() if name not in TORCHRUN}
        return run_script(*command, environ=alone), gateways


def test_outside_a_run_the_error_says_what_to_do() -> None:
    with pytest.raises(NotLaunchedError, match=r"isthmus launch.*alone=True"):
        join()


def test_what_has_torch_crash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = environment(tmp_path, 0, 0, [1], tmp_path / "gateway")
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    monkeypatch.setattr(os, "environ", {**os.environ, **launched, **detail})
    with pytest.raises(ConfigError, match="say TORCH_DISTRIBUTED_DEBUG=INFO"):
        join()


def test_a_nodes_gateways_divide_its_ranks(tmp_path: Path) -> None:
    whole = environment(tmp_path, 0, 0, [4], tmp_path / "gateway")
    whole |= {"ISTHMUS_GATEWAY": "/g2:/g3", "LOCAL_WORLD_SIZE": "4"}
    found = [Environment.read({**whole, "LOCAL_RANK": str(rank)}).gateway for rank in range(4)]
    assert [each.name for each in found] == ["g2", "g2", "g3", "g3"]


def test_a_launchers_mistakes_are_named(tmp_path: Path) -> None:
    whole = environment(tmp_path, 0, 0, [1], tmp_path / "gateway")
    assert Environment.read(whole).site == "site0"
    assert Environment.read(whole).spec.topology.failure.detect_within_s == 6.0
    lacking = {name: text for name, text in whole.items() if name != "ISTHMUS_SPEC"}
    for wrong, said in [
        (lacking, "ISTHMUS_SPEC not set"),
        ({**whole, "ISTHMUS_GENERATION": "new"}, "ISTHMUS_GENERATION: want a whole number"),
        ({**whole, "ISTHMUS_SPEC": str(tmp_path / "no.json")}, "no.json: cannot be read"),
        ({**whole, "ISTHMUS_SPEC": str(SCRIPT)}, "is not JSON"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Environment.read(wrong)


@pytest.mark.slow
def test_importing_isthmus_does_not_import_torch() -> None:
    listed = "assert {'Site', 'join'} <= {*dir(isthmus)}"
    code = f"import sys, isthmus; {listed}; sys.exit('torch' in sys.modules)"
    assert run_script("-c", code).returncode == 0


class TestAlone:
    pytestmark = multiprocess

    def test_python_runs_the_same_script_whose_site_says_who_it_is(self) -> None:
        code = f"import runpy; print(runpy.run_path({str(SCRIPT)!r})['site'])"
        ended = run_script("-c", code)
        assert ended.returncode == 0, ended.stderr
        script, site = ended.stdout.splitlines()
        assert script.startswith("alone 0 1 ")
        assert site == "<isthmus.Site alone, 1 of 1: rank 0 of 1, on cpu; sync>"
        assert ended.stderr == ""

    def run_two(self, folder: Path, program: Program) -> list[Any]:
        """Run two ranks of one site; return what each has saved."""
        codes = run_ranks(folder, [folder / "no_gateway"], [2], program)
        assert [*codes.values()] == [0, 0]
        return [*results(folder).values()]

    def test_ranks_of_torchrun_train_together(self, tmp_path: Path) -> None:
        one, other = self.run_two(tmp_path, worker_programs.train_alone)
        assert (one["place"], other["place"]) == (["alone", 0, 2], ["alone", 1, 2])
        assert torch.equal(one["weight"], other["weight"])

    def test_a_run_of_two_models_is_resumed_by_a_backward_pass_through_one(
        self, tmp_path: Path
    ) -> None:
        for grads, *others in self.run_two(tmp_path, worker_programs.resume_two_models):
            for found in others:
                assert len(found) == len(grads)
                assert all(map(torch.equal, found, grads))

    @pytest.mark.exhaustive
    def test_torchrun_runs_the_same_script(self) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = run_script(*torchrun, str(SCRIPT), "5")
        assert ended.returncode == 0, ended.stderr
        said = sorted(ended.stdout.splitlines())
        assert [line.split()[:3] for line in said] == [["alone", "0", "2"], ["alone", "1", "2"]]
        assert said[0].split(maxsplit=3)[3] == said[1].split(maxsplit=3)[3], "equal parameters"


JOINS_AGAIN = """
import multiprocessing, subprocess, sys, torch, isthmus

site = isthmus.join()
if __name__ == "__main__":
    for kind in sys.argv[1:]:
        worker = multiprocessing.get_context(kind).Process(target=print)
        worker.start()
        worker.join()
        assert worker.exitcode == 1
    assert subprocess.run([sys.executable, __file__]).returncode == 1
    averaged = torch.ones(2)
    site.all_reduce([averaged])
    print(averaged.tolist())
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.exhaustive
def test_a_process_that_a_rank_starts_does_not_join(tmp_path: Path) -> None:
    """Whatever started it: the script is imported again, and the rank goes on."""
    script = tmp_path / "script.py"
    script.write_text(JOINS_AGAIN)
    ended, gateways = run_as_rank(tmp_path, str(script), "spawn", "forkserver")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("RuntimeError: isthmus.join: called in process") == 3
    assert ended.stdout == "[1.0, 1.0]\n"
    assert gateways.left == [("site0", 0)]
    assert gateways.problems == []


class TestLeaving:
    pytestmark = multiprocess

    def test_a_script_that_ends_leaves(self, tmp_path: Path) -> None:
        ended, gateways = run_as_rank(tmp_path, str(SCRIPT), "2")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("site0 0 1 ")
        assert gateways.left == [("site0", 0)]
        steps = [each["step"] for _, _, each in gateways.metrics if each["kind"] == "step"]
        assert steps == [1, 2]
        assert gateways.problems == []

    @pytest.mark.exhaustive
    def test_a_crash_is_no_leave(self, tmp_path: Path) -> None:
        code = "import isthmus; site = isthmus.join(); raise ValueError(site.name)"
        ended, gateways = run_as_rank(tmp_path, "-c", code)
        assert ended.returncode == 1
        assert ended.stderr.splitlines()[-1].endswith("ValueError: site0")
        assert gateways.left == []
        assert gateways.problems == []


@pytest.mark.parametrize(
    ("num_ranks", "changes", "kind", "said"),
    [
        (1, {"ISTHMUS_GENERATION": "2"}, StaleGenerationError, "old"),
        (1, {"ISTHMUS_GATEWAY": "/nobody"}, IsthmusError, "no gateway listens at /nobody"),
        (2, {}, ConfigMismatchError, "has 2 ranks by the topology"),
    ],
)
def test_why_a_rank_cannot_join_is_said(
    tmp_path: Path,
    process_group: None,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    changes: dict[str, str],
    kind: type[IsthmusError],
    said: str,
) -> None:
    with FakeGateways(tmp_path, [num_ranks]) as gateways:
        launched = environment(tmp_path, 0, 0, [num_ranks], gateways.path(0))
        for name, text in {**launched, **changes}.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(kind, match=said):
            join()


def test_a_bug_in_hearing_a_result_is_told(tmp_path: Path) -> None:
    """Or backward would wait for its deadline."""

    def hear(_: Reduced) -> None:
        raise ZeroDivisionError("of nothing")

    failures: queue.Queue[IsthmusError] = queue.Queue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "gateway"))
        listener.listen()
        link = GatewayLink(tmp_path / "gateway", send_timeout_s=10.0)
        accepted, _ = listener.accept()
        with accepted:
            link.start(hear, failures.put)
            message = {"round": 0, "bucket": 0, "weight": 1.0, "wire_bytes": 0}
            times = {"inter_s": 0.0, "wait_s": 0.0, "encode_s": 0.0, "decode_s": 0.0}
            accepted.send(json.dumps({"op": "reduced", **message, "times": times}).encode())
            assert "ZeroDivisionError: of nothing" in str(failures.get(timeout=SCRIPT_S))
        link.close()
