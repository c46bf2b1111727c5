"""A user's own script in place of the trainer, and what is said when it breaks."""

from pathlib import Path

import pytest

from tests.multiprocess.harness import Bench, Result, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPTS = Path(__file__).parent / "scripts"
SITES = [(1, 2), (1, 1)]


def launch(run: Bench, *arguments: str, script: str = "user_ddp.py") -> Result:
    listed = ", ".join(f'"{argument}"' for argument in arguments)
    job = job_yaml(entrypoint=str(SCRIPTS / script)) + f"arguments: [{listed}]\n"
    return run.launch(topology_yaml(SITES, rtt="2ms"), job)


@pytest.mark.exhaustive
def test_it_runs_and_its_logs_are_shipped(run: Bench) -> None:
    result = launch(run, "5").check()
    assert result.envelope["data"]["verified_steps"] == 1 + 5
    assert len(run.losses()) == 5
    logs = run.isthmus("logs", "--site", "a").check()
    assert {"done a 0", "done a 1"} <= {line.split("| ")[-1] for line in logs.out.splitlines()}
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["user_plain.py", "user_fsdp.py"])
def test_without_distributed_data_parallel_sites_stay_equal(run: Bench, script: str) -> None:
    result = launch(run, "4", script=script).check()
    assert result.envelope["data"]["verified_steps"] == 1 + 4
    assert len(run.losses()) == 4
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "code", "exit_code", "said"),
    [
        ("exit17", "SCRIPT_FAILED", 17, "about to exit with 17"),
        ("raise", "SCRIPT_FAILED", 1, "a mistake in the user's script"),
    ],
)
def test_the_first_failure_is_named(
    run: Bench, fault: str, code: str, exit_code: int, said: str
) -> None:
    result = launch(run, "50", fault, "a", "1", "2").check(1)
    error = result.envelope["error"]
    assert error["code"] == code
    where = error["where"]
    assert (where["site"], where["rank"], where["exit_code"]) == ("a", 1, exit_code)
    assert said in Path(where["log_path"]).read_text()
    logs = run.isthmus("logs", "--site", "a", "--rank", "1").check()
    assert said in logs.out
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
def test_a_site_that_cannot_start_rolls_all_back(run: Bench) -> None:
    result = launch(run, "5", "import", "b", "0", "0").check(1)
    error = result.envelope["error"]
    assert error["code"] == "SCRIPT_FAILED"
    assert error["where"]["site"] == "b"
    assert "a_module_that_does_not_exist" in error["message"]
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
def test_one_flipped_bit_stops_the_run_and_names_the_tensor(run: Bench) -> None:
    result = launch(run, "400", "perturb", "b", "0", "3").check(1)
    error = result.envelope["error"]
    assert error["code"] == "PARAMETERS_DIFFER"
    assert "2.weight" in error["message"]
    assert "b" in error["message"]
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
def test_sites_that_read_the_same_data_are_told(run: Bench) -> None:
    job = job_yaml(entrypoint=str(SCRIPTS / "user_torchrun_data.py")) + 'arguments: ["site"]\n'
    result = run.launch(topology_yaml([(1, 1), (1, 1)], rtt="2ms"), job).check(1)
    error = result.envelope["error"]
    assert error["code"] == "SAME_DATA"
    assert "sites a and b had the same gradient in step" in error["message"]
    run.wait_for_nothing_left(20)


@pytest.mark.exhaustive
def test_the_global_environment_gives_each_site_its_own_data(run: Bench) -> None:
    job = job_yaml(entrypoint=str(SCRIPTS / "user_torchrun_data.py")) + 'arguments: ["global"]\n'
    run.launch(topology_yaml([(1, 1), (1, 1)], rtt="2ms"), job).check()
    run.wait_for_nothing_left(20)
