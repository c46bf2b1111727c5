"""A script that fails at one site of three, and what becomes of the run."""

from pathlib import Path

import pytest

from isthmus.protos.catalogue import ExitCode
from tests.multiprocess.harness import Bench, Result, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "user_ending.py"
STEPS = 12


def launch(run: Bench, ending: str, failure: str = "") -> Result:
    """Have the script end so at rank 0 of site b, in a run that may lose sites."""
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], emulate=False, rtt="2ms", min_sites=1, max_restarts=0
    )
    topology = topology.replace("failure: {", f"failure: {{{failure}")
    job = job_yaml(entrypoint=str(SCRIPT)) + f"arguments: ['{STEPS}', {ending}, b, '0']\n"
    return run.launch(topology, job)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ending", "said", "log"),
    [
        ("raise", "ValueError: a mistake in the user's script", "Traceback"),
        ("type", "TypeError: Site.attach() got an unexpected keyword", "Traceback"),
        ("status", "exited with status 3", ""),
        ("'last raise'", "ValueError: after the last step", "Traceback"),
    ],
)
def test_the_run_ends_and_names_it(run: Bench, ending: str, said: str, log: str) -> None:
    error = launch(run, ending).check(ExitCode.JOB_FAILED).envelope["error"]
    assert error["code"] == "SCRIPT_FAILED"
    assert said in error["message"]
    where = error["where"]
    assert (where["site"], where["rank"]) == ("b", 0)
    assert log in Path(where["log_path"]).read_text()
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ending", "failure"), [("raise", "on_script_error: go_on, "), ("disk", "")]
)
def test_the_others_go_on_and_the_loss_is_said_at_once_and_at_the_end(
    run: Bench, ending: str, failure: str
) -> None:
    result = launch(run, ending, failure).check(ExitCode.WITH_LOSSES)
    data = result.envelope["data"]
    assert (data["state"], data["reason_code"]) == ("SUCCEEDED", "WITH_LOSSES")
    assert "site b was lost and did not come back: rank 0 of site b" in data["reason"]
    assert (data["failure"]["site"], data["failure"]["rank"]) == ("b", 0)
    (loss,) = [each for each in data["noted"] if each["kind"] == "site.lost"]
    assert "the run continues without site b" in loss["text"]
    lines = result.err.splitlines()
    (at,) = [number for number, line in enumerate(lines) if loss["text"] in line]
    assert any(line.startswith("ACTIVE") for line in lines[:at])
    waited = run.isthmus("wait").check(ExitCode.WITH_LOSSES)
    assert "SUCCEEDED WITH LOSSES" in waited.out
    assert loss["text"] in waited.err
    status = run.isthmus("status").check()
    assert "SUCCEEDED WITH LOSSES" in status.out
    run.isthmus("report").check()
    assert loss["text"] in (run.run_folder() / "report.html").read_text()
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
def test_losses_that_are_allowed_are_no_failure(run: Bench) -> None:
    data = launch(run, "disk", "allow_losses: true, ").check().envelope["data"]
    assert (data["state"], data["reason_code"]) == ("SUCCEEDED", "")
    assert "sites lost on the way: b" in data["notes"]
    run.wait_for_nothing_left(20)
