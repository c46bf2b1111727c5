"""What the coordinator's Prepare asks of a site, and what this build refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.protos.control.v1 import control_pb2 as control
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.gateway_configs import gateway_config
from isthmus.sites.node.order import SiteOrder, make_order, read_spec
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.spec.plan_wishes import Replan
from tests.fakes.agent_bench import SCRIPT, job_yaml, prepare, topology_yaml
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import JOB, topology


def read_order(message: control.Prepare, site: str, state: Path) -> SiteOrder:
    return make_order(message, read_spec(message, site), site, state)


def test_an_order_says_what_to_start(tmp_path: Path) -> None:
    message = prepare(topology_yaml(2, 3), job_yaml("done"))
    order = read_order(message, "a", tmp_path)
    assert order.folder == tmp_path / "r1"
    assert order.command == (str(SCRIPT), "done")
    assert order.node_folder(1).is_dir()
    environment = order.environment([Path("/s"), Path("/t")])
    assert Path(environment["ISTHMUS_SPEC"]).read_bytes() == message.run_spec
    assert environment["ISTHMUS_GATEWAY"] == "/s:/t"
    assert (order.folder / "job.yaml").read_text() == message.job.text
    assert order.name == "r1-1"


def test_a_script_runs_where_the_job_says_or_the_site(tmp_path: Path) -> None:
    """The folder of the job file is a site's own, where the topology says so."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there, there / "inner"):
        folder.mkdir()
        (folder / "train.py").touch()

    def order(more: str = "", at_site: str = "") -> SiteOrder:
        text = topology_yaml().replace("{name: a,", f"{{name: a, {at_site}")
        job = load_job(
            f"{{version: 1, name: t, topology: t.yaml, entrypoint: train.py{more}}}", "job.yaml"
        )
        message = prepare(topology_yaml(), job_yaml())
        message.run_spec = spec_of(job, load_topology(text, "t.yaml"), folder=here).to_bytes()
        return read_order(message, "a", tmp_path)

    assert (order().working_folder, order().command) == (here, (str(here / "train.py"),))
    moved = order(at_site=f"job_folder: {there},")
    assert (moved.working_folder, moved.command) == (there, (str(there / "train.py"),))
    inner = order(", working_folder: inner", f"job_folder: {there},")
    assert (inner.working_folder, inner.command) == (there / "inner", moved.command)
    elsewhere = order(f", working_folder: {tmp_path}", f"job_folder: {there},")
    assert elsewhere.working_folder == tmp_path
    with pytest.raises(
        SiteError, match=rf"cannot run in {here}/inner: No such .* at site a.*job_f"
    ):
        order(", working_folder: inner")


def test_the_trainer_that_ships_needs_no_folder_of_the_users(tmp_path: Path) -> None:
    message = prepare(topology_yaml(), job_yaml())
    job = load_job("{version: 1, name: t, topology: t.yaml}", "job.yaml")
    spec = spec_of(job, load_topology(topology_yaml(), "t.yaml"), folder=Path("/nowhere"))
    message.run_spec = spec.to_bytes()
    assert read_order(message, "a", tmp_path).working_folder == tmp_path / "r1"


def test_ranks_have_the_variables_of_the_job_and_secrets_are_in_no_text(tmp_path: Path) -> None:
    text = job_yaml() + "env: {COLOUR: red}\npass_env: [TOKEN]\n"
    message = prepare(topology_yaml(), text)
    with pytest.raises(SiteError, match="no value of TOKEN") as caught:
        read_order(message, "a", tmp_path)
    assert caught.value.code == "CONFIG_MISMATCH"
    message.passed_env["TOKEN"] = "s3cret"
    message.passed_env["PATH"] = "/not-asked-for"
    order = read_order(message, "a", tmp_path)
    environment = order.environment([Path("/s")])
    assert (environment["COLOUR"], environment["TOKEN"]) == ("red", "s3cret")
    assert "PATH" not in environment
    assert "s3cret" not in repr(order)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(b"s3cret" in each for each in written)


def test_an_embedded_agents_folder_is_its_runs_already(tmp_path: Path) -> None:
    state = tmp_path / "runs" / "r1" / "sites" / "a"
    assert read_order(prepare(topology_yaml(), job_yaml()), "a", state).folder == state


def test_a_probe_takes_one_node_of_a_site(tmp_path: Path) -> None:
    order = read_order(prepare(topology_yaml(2, 3), job_yaml() + "probe: {}\n"), "a", tmp_path)
    assert order.site.nodes == 1
    config = node_config(order, 0)
    assert config.probe is not None
    assert config.gateways_per_site == (1, 1)


def node_config(order: SiteOrder, node: int) -> GatewayConfig:
    return gateway_config(
        order.spec,
        run_id=order.run_id,
        generation=order.generation,
        config_hash=order.spec_hash,
        site=order.site.name,
        gateway=node,
        bind_host="127.0.0.1",
        socket_path="/s",
    )


def test_gateways_have_links_to_all_sites_for_members_and_trees_may_change() -> None:
    def neighbours(replan: Replan | None) -> list[str]:
        job = load_job(JOB + "reduction: {tree: star, hub: b}\n", "job.yaml")
        order = SiteOrder(
            run_id="r1",
            generation=1,
            spec=spec_of(job, topology(3), replan),
            spec_hash="",
            site=topology(3).sites[0],
            folder=Path("/r1"),
            command=(),
            working_folder=Path("/r1"),
        )
        return [link.site for link in node_config(order, 0).links]

    assert neighbours(None) == ["b", "c"]
    assert neighbours(Replan()) == ["b", "c"]


def _no_spec(message: control.Prepare) -> None:
    message.run_spec = b""


def _newer_spec(message: control.Prepare) -> None:
    fields = {**json.loads(message.run_spec), "newer": 1}
    message.run_spec = json.dumps(fields).encode()


def _bad_name(message: control.Prepare) -> None:
    message.run_id = "../x"


def _no_script(message: control.Prepare) -> None:
    message.CopyFrom(prepare(topology_yaml(), job_yaml(entrypoint="/no/such.py")))


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (_no_spec, "CONFIG_MISMATCH", "is not JSON"),
        (_newer_spec, "CONFIG_MISMATCH", "newer: unknown; .* another build"),
        (_bad_name, "PROTOCOL_VIOLATION", "no name of a run"),
        (_no_script, "LAUNCH_FAILED", "/no/such.py"),
    ],
)
def test_what_cannot_be_started_is_said(
    tmp_path: Path, spoil: Callable[[control.Prepare], None], code: str, said: str
) -> None:
    message = prepare(topology_yaml(), job_yaml())
    spoil(message)
    with pytest.raises(SiteError, match=said) as caught:
        read_order(message, "a", tmp_path)
    assert caught.value.code == code


def test_a_site_that_is_not_in_the_topology_is_named(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="no site 'z'"):
        read_order(prepare(topology_yaml(), job_yaml()), "z", tmp_path)
