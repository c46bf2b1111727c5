"""The files that `isthmus init` writes."""

import pytest

from isthmus.topology.documents.load import document_kind, load_job, load_topology
from isthmus.topology.documents.run_documents import check_pair
from isthmus.topology.presets.templates import PRESETS, SCHEMAS, job_yaml, topology_yaml
from isthmus.topology.text.yaml_document import read_with_overrides
from isthmus.topology.trees.tree_choice import plan_reduction


def test_the_templates_load_and_fit_together() -> None:
    world = load_topology(topology_yaml(), "topology.yaml")
    job = load_job(job_yaml(), "job.yaml")
    check_pair(job, world, read_with_overrides(job_yaml(), "job.yaml", ()))
    assert document_kind(read_with_overrides(topology_yaml(), "topology.yaml", ())) == "topology"
    assert document_kind(read_with_overrides(job_yaml(), "job.yaml", ())) == "job"
    assert [site.num_ranks for site in world.sites] == [2, 2, 2]
    assert world.emulate
    assert all(0.01 <= link.rtt_s <= 0.08 for link in world.links)
    assert all(100e6 <= link.bytes_per_s * 8 <= 500e6 for link in world.links)
    assert world.failure.detect_within_s == 15
    assert job.topology == "topology.yaml"
    assert not plan_reduction(job, world).is_gather


def test_the_first_line_leads_an_editor_to_the_schema_beside_the_file() -> None:
    for kind, text in (("topology", topology_yaml()), ("job", job_yaml())):
        line = f"# yaml-language-server: $schema={SCHEMAS}/{kind}.schema.json\n"
        assert text.startswith(line)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads_and_fits_together(preset: str) -> None:
    world = load_topology(topology_yaml(preset), "topology.yaml")
    job = load_job(job_yaml(preset), "job.yaml")
    check_pair(job, world, read_with_overrides(job_yaml(preset), "job.yaml", ()))
    assert (world.name, job.topology) == (preset, "topology.yaml")
    runs_here = "runs here as it is" in PRESETS[preset]
    assert runs_here == (world.emulate and world.num_ranks <= 8)
    assert all(link.rtt_s <= 0.5 for link in world.links)


def test_the_mesh_joins_all_with_all() -> None:
    world = load_topology(topology_yaml("mesh-16"), "topology.yaml")
    assert (len(world.sites), len(world.links), world.num_ranks) == (16, 240, 1024)
    assert {link.rtt_origin for link in world.links} == {"locations"}


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(KeyError):
        topology_yaml("four-planets")


@pytest.mark.parametrize("preset", PRESETS)
def test_no_line_is_too_long_for_a_terminal(preset: str) -> None:
    for text in (topology_yaml(preset), job_yaml(preset)):
        assert max(len(line) for line in text.splitlines()[1:]) <= 115
