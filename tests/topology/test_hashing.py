"""Hashes: the same for the same configuration, however it is spelt; another for any other."""

import pytest

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.spec.hashing import config_hash, topology_hash
from tests.topology.documents import JOB, TOPOLOGY, changed

WORLD = load_topology(TOPOLOGY, "t.yaml")


def test_spelling_and_comments_do_not_count() -> None:
    other = changed(TOPOLOGY, "rtt: 62ms", "rtt: 0.062s") + "# a comment\n"
    other = changed(other, "loss: 0.001%", "loss: 0.00001")
    assert topology_hash(load_topology(other, "elsewhere.yaml")) == topology_hash(WORLD)


def test_an_override_is_the_same_as_the_file_saying_so() -> None:
    written = load_topology(changed(TOPOLOGY, "rtt: 62ms", "rtt: 9ms"), "t.yaml")
    overridden = load_topology(TOPOLOGY, "t.yaml", ["links.0.rtt=9ms"])
    assert topology_hash(written) == topology_hash(overridden) != topology_hash(WORLD)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rtt: 62ms", "rtt: 62.001ms"),
        ("min_sites: 2", "min_sites: 3"),
        ("emulate: true", "emulate: false"),
        ("to: 18:00", "to: 18:01"),
        ("mfu: 0.42", "mfu: 0.43"),
    ],
)
def test_every_figure_counts(old: str, new: str) -> None:
    other = load_topology(changed(TOPOLOGY, old, new), "t.yaml")
    assert topology_hash(other) != topology_hash(WORLD)


def test_a_configuration_is_job_and_topology_but_not_the_path_between_them() -> None:
    job = load_job(JOB, "job.yaml")
    moved = load_job(changed(JOB, "topology: topology.yaml", "topology: ../x.yaml"), "job.yaml")
    longer = load_job(JOB, "job.yaml", ["trainer.steps=21"])
    elsewhere = load_topology(TOPOLOGY, "t.yaml", ["links.0.rtt=9ms"])
    assert config_hash(job, WORLD) == config_hash(moved, WORLD)
    assert len({config_hash(job, WORLD), config_hash(longer, WORLD), config_hash(job, elsewhere), topology_hash(WORLD)}) == 4  # fmt: skip


def test_a_hash_is_a_lasting_name() -> None:
    """Sites of different versions compare it: a change here is a change of protocol."""
    assert len(topology_hash(WORLD)) == 64
    assert topology_hash(WORLD) == topology_hash(load_topology(TOPOLOGY, "t.yaml"))
