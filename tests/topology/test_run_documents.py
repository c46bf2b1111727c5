"""Rules over a job and its topology together, told at the job's lines."""

import pytest

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.documents.run_documents import check_pair
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.topology.documents import JOB, TOPOLOGY, changed

SKETCH = load_topology(TOPOLOGY, "tri.yaml")


def told(text: str, *overrides: str) -> list[str]:
    """Return the problems of a job with the sketch's topology."""
    job = load_job(text, "job.yaml", overrides)
    try:
        check_pair(job, SKETCH, read_with_overrides(text, "job.yaml", overrides))
    except ConfigError as error:
        return [
            f"{each.source}:{each.line}:{each.column} {each.message} [{each.path}]"
            for each in error.problems
        ]
    return []


def test_a_job_that_fits_is_accepted() -> None:
    assert told(JOB) == []
    assert told(changed(JOB, "{tree: star, hub: virginia}", "{tree: auto}")) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "hub: virginia",
            "hub: virgina",
            "job.yaml:5:30 unknown site 'virgina' (did you mean 'virginia'?) [reduction.hub]",
        ),
        (
            "hub: virginia",
            "hub: ohio",
            "job.yaml:5:30 'ohio' has no links both ways with oregon [reduction.hub]",
        ),
        (
            "{tree: star, hub: virginia}",
            "{tree: gather}",
            "job.yaml:5:19 gather needs links both ways between all sites; "
            "'oregon' lacks them with ohio [reduction.tree]",
        ),
        (
            "global_batch: 96",
            "global_batch: 79",
            "job.yaml:9:17 want at least 80, a sequence for each rank of 'tri-coast'; got 79; "
            "with a `plan` section, `launch` leaves sites out [trainer.global_batch]",
        ),
        (
            "  global_batch: 96\n",
            "",
            "job.yaml:8:3 want at least 80, a sequence for each rank of 'tri-coast'; got 48; "
            "with a `plan` section, `launch` leaves sites out [trainer.global_batch]",
        ),
    ],
)
def test_what_does_not_fit_is_told_at_the_jobs_line(old: str, new: str, expected: str) -> None:
    assert told(changed(JOB, old, new)) == [expected]


def test_all_is_told_at_once_and_overrides_as_they_were_typed() -> None:
    assert told(JOB, "reduction.hub=ohio", "trainer.global_batch=3") == [
        "--set reduction.hub:0:0 'ohio' has no links both ways with oregon [reduction.hub]",
        "--set trainer.global_batch:0:0 want at least 80, a sequence for each rank of 'tri-coast'; "
        "got 3 [trainer.global_batch]",
    ]


def test_a_script_of_ones_own_may_use_any_batch() -> None:
    assert told(JOB, "entrypoint=train.py", "trainer.global_batch=3") == []
