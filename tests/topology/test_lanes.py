"""How many gateways a node gets where the topology leaves it to isthmus."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.lanes import (
    AgentMachine,
    Lanes,
    bounds_of_lanes,
    cores_per_node,
    decide_lanes,
    lanes_of,
    with_lanes,
)
from isthmus.topology.spec.world import Topology

TEXT = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 1TFLOP/s}, memory: 4GiB}}
sites:
  - {name: a, nodes: NODES, accelerators_per_node: RANKS, accelerator: chip, wan: {WAN}, EXTRA}
  - {name: b, nodes: 1, accelerators_per_node: 8, accelerator: chip}
links: [{between: [a, b], bandwidth: RATE, rtt: 1ms}]
security: {mode: insecure}
"""


def topology(
    rate: str = "100Gbit/s",
    ranks: int = 8,
    nodes: int = 1,
    wan: str = "",
    extra: str = "launcher: {kind: local}",
) -> Topology:
    changes = {"RATE": rate, "RANKS": str(ranks), "NODES": str(nodes), "WAN": wan, "EXTRA": extra}
    text = TEXT
    for word, value in changes.items():
        text = text.replace(word, value)
    return load_topology(text, "topology.yaml")


def of_a(world: Topology, cores: int | None) -> Lanes:
    return lanes_of(world.sites[0], world, cores)


@pytest.mark.parametrize(
    ("rate", "wan", "ranks", "nodes", "cores", "count", "limit"),
    [
        # This project's small machines: one, whatever the links are.
        ("100Gbit/s", "", 1, 1, 2, 1, "ranks"),
        ("100Gbit/s", "", 8, 1, 2, 1, "cores"),
        # Links.
        ("1Gbit/s", "", 8, 1, 128, 1, "links"),
        ("12Gbit/s", "", 8, 1, 128, 1, "links"),
        ("13Gbit/s", "", 8, 1, 128, 2, "links"),
        ("25Gbit/s", "", 8, 1, 128, 4, "links"),  # 3 do not divide 8 ranks
        ("25Gbit/s", "", 6, 1, 128, 3, "links"),
        ("100Gbit/s", "", 8, 4, 128, 4, "links"),  # 25 Gbit/s a node
        # The card.
        ("400Gbit/s", "nic: 25Gbit/s", 8, 1, 128, 4, "card"),
        ("20Gbit/s", "nic: 100Gbit/s", 8, 1, 128, 2, "links"),
        # Ranks: each has one gateway.
        ("100Gbit/s", "", 1, 1, 128, 1, "ranks"),
        ("100Gbit/s", "", 4, 1, 128, 4, "ranks"),
        # Cores: one a rank, two a gateway.
        ("100Gbit/s", "", 8, 1, 16, 4, "cores"),
        ("100Gbit/s", "", 8, 1, 14, 2, "cores"),  # 3 do not divide 8 ranks
        ("100Gbit/s", "", 4, 1, 16, 4, "ranks"),
        ("100Gbit/s", "", 8, 1, 0, 1, "cores"),
        # Ports: two for each gateway.
        ("100Gbit/s", "ports: 29500-29502", 8, 1, 128, 2, "ports"),
        # Nobody knows the cores.
        ("100Gbit/s", "", 8, 1, None, 8, "ranks"),
    ],
)
def test_what_limits_the_gateways_of_a_node(
    rate: str, wan: str, ranks: int, nodes: int, cores: int | None, count: int, limit: str
) -> None:
    lanes = of_a(topology(rate, ranks, nodes, wan), cores)
    assert (lanes.num_gateways, lanes.limit) == (count, limit), lanes


def test_links_of_a_site_count_together_in_the_direction_that_carries_more() -> None:
    text = TEXT.replace("NODES", "1").replace("RANKS", "8").replace("WAN", "")
    text = text.replace("EXTRA", "launcher: {kind: local}")
    text = text.replace("between: [a, b], bandwidth: RATE", "between: [a, b], bandwidth: 10Gbit/s")
    text = text.replace("links:", "  - {name: c, like: b}\nlinks:")
    text = text.replace(
        "rtt: 1ms}]",
        "rtt: 1ms}, {between: [c, a], bandwidth: 20Gbit/s, rtt: 1ms, oneway: true}, "
        "{between: [a, c], bandwidth: 1Gbit/s, rtt: 1ms, oneway: true}]",
    )
    world = load_topology(text, "topology.yaml")
    assert of_a(world, None).asked["links"] == 3  # 30 Gbit/s come in, 11 go out


def test_reasons_are_told() -> None:
    lanes = of_a(topology(wan="nic: 50Gbit/s, ports: 29500-29599"), 16)
    assert lanes.why == (
        "links ask for 9, the card for 5, ranks allow 8, cores allow 4, ports allow 100; limited by "
        "cores"
    )
    assert lanes.is_of_interest
    assert not of_a(topology("1Gbit/s"), 16).is_of_interest


BIG = AgentMachine(host="one", usable_cores=64)


@pytest.mark.parametrize(
    ("extra", "nodes", "machines", "cores"),
    [
        ("launcher: {kind: local}", 1, {"a": BIG}, {"a": 64}),
        ("launcher: {kind: local}", 1, {"a": BIG, "b": BIG}, {"a": 32, "b": 32}),
        (
            "launcher: {kind: local}",
            1,
            {"a": BIG, "b": AgentMachine(host="two", usable_cores=8)},
            {"a": 64, "b": 8},
        ),
        ("launcher: {kind: local}", 3, {"a": BIG, "b": BIG}, {"a": 16, "b": 16}),
        ("launcher: {kind: slurm}", 3, {"a": BIG}, {"a": 64}),
        ("hosts: [127.0.0.2, 127.0.0.3]", 2, {"a": BIG}, {"a": 64}),
        (
            "hosts: [127.0.0.2, 127.0.0.3]",
            2,
            {"a": dataclasses.replace(BIG, has_all_nodes=True)},
            {"a": 32},
        ),
        ("launcher: {kind: local}", 1, {}, {}),
    ],
)
def test_nodes_on_one_machine_share_its_cores(
    extra: str, nodes: int, machines: dict[str, AgentMachine], cores: dict[str, int]
) -> None:
    assert cores_per_node(topology(nodes=nodes, extra=extra), machines) == cores


def test_a_site_whose_agent_is_not_there_gets_one() -> None:
    world = topology()
    assert {name: each.num_gateways for name, each in decide_lanes(world, {"a": BIG}).items()} == {
        "a": 8,
        "b": 1,
    }


def test_what_the_topology_says_stays() -> None:
    world = topology(wan="gateways_per_node: 2")
    lanes = decide_lanes(world, {"a": BIG, "b": BIG})
    assert list(lanes) == list(bounds_of_lanes(world)) == ["b"]
    assert [site.gateways_per_node for site in with_lanes(world, lanes).sites] == [2, 8]


def test_one_that_was_decided_is_as_one_that_was_written() -> None:
    """The same hash and the same JSON, so plans and journals of before still fit."""
    auto, written = topology(wan="gateways_per_node: auto"), topology(wan="gateways_per_node: 1")
    assert topology_hash(auto) == topology_hash(written)
    decided = with_lanes(auto, decide_lanes(auto, {}))
    assert to_json(decided.sites[0]) == to_json(written.sites[0])
    assert not decided.sites[0].chooses_gateways


def test_auto_is_the_default_and_goes_along_with_like() -> None:
    given = "{name: b, like: a, wan: {%s}}"
    others = "{name: b, nodes: 1, accelerators_per_node: 8, accelerator: chip}"
    filled = TEXT.replace("NODES", "1").replace("RANKS", "8").replace("RATE", "1Gbit/s")
    filled = filled.replace("EXTRA", "launcher: {kind: local}")
    for own, liked, expected in (
        ("", "", [True, True]),
        ("gateways_per_node: 2", "", [False, False]),
        ("gateways_per_node: 2", "gateways_per_node: auto", [False, True]),
        ("gateways_per_node: auto", "gateways_per_node: 4", [True, False]),
    ):
        text = filled.replace("WAN", own).replace(others, given % liked)
        sites = load_topology(text, "topology.yaml").sites
        assert [site.chooses_gateways for site in sites] == expected, (own, liked)


@pytest.mark.parametrize("value", ["0", "129", "true", "2.5", "many"])
def test_wrong_numbers_are_told(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology(wan=f"gateways_per_node: {value}")
    [problem] = caught.value.problems
    assert problem.path == "sites.0.wan.gateways_per_node"
    assert problem.message.startswith("want auto, or a whole number from 1 to 128; got ")
