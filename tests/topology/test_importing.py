"""Maps of networks into topologies: the two formats, what is assumed, and what is refused."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from isthmus.topology.documents.load import load_topology
from isthmus.topology.importing.map_files import read_map
from isthmus.topology.importing.map_import import Imported, Wishes, import_topology
from isthmus.topology.importing.places import cities, nearest_city, place_of, plain, unique_names
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.geography import great_circle_km
from isthmus.topology.spec.world import Topology

MAPS = Path(__file__).parent / "maps"
TEN_GBIT = Wishes(bytes_per_s=1.25e9)


def imported(name: str, wishes: Wishes = TEN_GBIT) -> tuple[Imported, Topology]:
    found = import_topology((MAPS / name).read_text(), f"maps/{name}", wishes)
    return found, load_topology(found.text, "topology.yaml")


def told(text: str, wishes: Wishes = TEN_GBIT) -> str:
    """Return the one problem that a map has."""
    with pytest.raises(ConfigError) as caught:
        import_topology(text, "map", wishes)
    (problem,) = caught.value.problems
    place = f"{problem.line}:{problem.column} " if problem.line else ""
    return f"{place}{problem.message}"


def node_link(nodes: list[Any], edges: list[Any], **others: object) -> str:
    return json.dumps({"nodes": nodes, "edges": edges, **others})


def test_node_link_becomes_sites_and_links_with_what_the_map_says() -> None:
    found, world = imported("backbone.json")
    document = json.loads((MAPS / "backbone.json").read_text())
    assert world.name == "research-backbone"
    assert (found.num_sites, found.num_links, found.warnings) == (11, 14, ())
    names = [plain(node["name"]) for node in document["nodes"]]
    assert [site.name for site in world.sites] == names
    for node, site in zip(document["nodes"], world.sites, strict=True):
        assert site.location is not None
        assert [site.location.lon, site.location.lat] == node["pos"]
    for edge in document["edges"]:
        link = world.link(names[edge["source"]], names[edge["target"]])
        assert link is not None
        assert (link.distance_km, link.bytes_per_s) == (edge["dist"], 1.25e9)
    assert len(world.links) == 28


def test_graphml_becomes_sites_and_links_with_what_the_map_says() -> None:
    found, world = imported("zoo.graphml")
    assert world.name == "ring-of-four"
    names = ["paris", "frankfurt-main", "paris-2", "zurich"]
    assert [site.name for site in world.sites] == names
    rates = {(link.source, link.target): link.bytes_per_s * 8 for link in world.links}
    assert rates["paris", "frankfurt-main"] == 10e9
    assert rates["frankfurt-main", "paris-2"] == 2.5e9
    assert rates["zurich", "paris"] == 2e9  # two parallel lines
    assert rates["paris-2", "zurich"] == 10e9  # not said: --bandwidth
    assert {link.rtt_origin for link in world.links} == {"locations"}
    assert found.warnings == (
        "zurich: no coordinates in the map; those of the city were taken",
        "left out: 1 edges from a node to itself",
        "1 parallel edges were added to those beside them",
        "2 of 8 directed edges had no speed",
    )


def test_the_text_is_commented_and_says_where_it_is_from() -> None:
    found, _ = imported("backbone.json")
    lines = found.text.splitlines()
    assert lines[0].startswith("# yaml-language-server: ")
    assert lines[1] == "# Imported from backbone.json: 11 sites, 14 links."
    assert max(len(line) for line in lines[1:]) <= 115


def test_what_every_site_has_can_be_said() -> None:
    wishes = Wishes(bytes_per_s=1e9, accelerator="h100-sxm", nodes=4, accelerators_per_node=8)
    _, world = imported("backbone.json", wishes)
    assert {site.num_ranks for site in world.sites} == {32}
    assert {site.accelerator.name for site in world.sites} == {"h100-sxm"}


def test_chosen_sites_are_joined_along_the_shortest_paths() -> None:
    wishes = Wishes(bytes_per_s=1e9, sites=("seattle", "houston", "new-york"))
    _, world = imported("backbone.json", wishes)
    lengths = {(link.source, link.target): link.distance_km for link in world.links}
    assert lengths["seattle", "houston"] == 1640 + 900 + 1040
    assert lengths["seattle", "new-york"] == 1640 + 900 + 730 + 270 + 1150
    assert lengths["houston", "new-york"] == 1130 + 870 + 330
    assert len(world.sites) == 3


def test_what_lies_behind_a_chosen_site_is_reached_through_it() -> None:
    edges = [{"source": 0, "target": 1, "dist": 10}, {"source": 1, "target": 2, "dist": 20}]
    nodes = [{"id": i, "name": name} for i, name in enumerate("abc")]
    text = node_link(nodes, edges)
    assert import_topology(text, "map", TEN_GBIT).num_links == 2
    ends = Wishes(bytes_per_s=1e9, sites=("a", "c"))
    world = load_topology(import_topology(text, "map", ends).text, "t")
    assert [link.distance_km for link in world.links] == [30, 30]


@pytest.mark.parametrize("seed", range(10))
def test_shortest_paths_are_those_of_floyd_and_warshall(seed: int) -> None:
    generator = random.Random(seed)
    count = 9
    edges = [
        {"source": one, "target": other, "dist": generator.randint(5, 900)}
        for one in range(count)
        for other in range(one)
        if other == one - 1 or generator.random() < 0.3
    ]
    nodes = [{"id": index, "name": f"n{index}"} for index in range(count)]
    best = [[0 if i == j else 1e9 for j in range(count)] for i in range(count)]
    for edge in edges:
        one, other, km = edge["source"], edge["target"], edge["dist"]
        best[one][other] = best[other][one] = min(km, best[one][other])
    for middle in range(count):
        for one in range(count):
            for other in range(count):
                best[one][other] = min(best[one][other], best[one][middle] + best[middle][other])
    wishes = Wishes(bytes_per_s=1e9, sites=("n0", "n8"))
    world = load_topology(import_topology(node_link(nodes, edges), "map", wishes).text, "t")
    assert {link.distance_km for link in world.links} == {best[0][8]}, f"{seed=}"


def test_directions_that_differ_are_links_of_their_own() -> None:
    nodes = [{"id": "x", "pos": [4.9, 52.37]}, {"id": "y", "pos": [-0.13, 51.51]}]
    edges = [
        {"source": "x", "target": "y", "LinkSpeedRaw": 1e9},
        {"source": "y", "target": "x", "LinkSpeedRaw": 5e8},
    ]
    text = node_link(nodes, edges, directed=True)
    world = load_topology(import_topology(text, "map", Wishes()).text, "t")
    rates = {(link.source, link.target): link.bytes_per_s * 8 for link in world.links}
    assert rates == {("amsterdam", "london"): 1e9, ("london", "amsterdam"): 5e8}


def test_nodes_without_a_name_are_called_after_their_city_or_their_id() -> None:
    nodes = [{"id": 7, "pos": [8.68, 50.11]}, {"id": 8, "pos": [0, 0]}, {"id": 9, "name": "911"}]
    edges = [{"source": 7, "target": 8}, {"source": 8, "target": 9, "dist": 5}]
    text = import_topology(node_link(nodes, edges, graph={"name": "2020"}), "map", TEN_GBIT).text
    world = load_topology(text, "t")
    assert [site.name for site in world.sites] == ["frankfurt", "site-8", "911"]
    assert world.name == "2020"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "want node-link JSON or GraphML: it begins with neither { nor <"),
        ('{"nodes": [}', "1:12 not JSON: Expecting value"),
        ('{"a":' * 200_000, "not JSON that can be read here: nested too deeply"),
        (
            '{"nodes": {}}',
            "want node-link JSON: an object with the lists 'nodes' and 'edges' (or 'links')",
        ),
        (node_link([], []), "there is no node in it"),
        (node_link([{"name": "a"}], []), "nodes[0]: want an object with an id"),
        (node_link([{"id": 1}, {"id": "1"}], []), "two nodes have the id '1'"),
        (
            node_link([{"id": 1}], [{"source": 1}]),
            "edges[0]: want an object with source and target, ids of nodes",
        ),
        (
            node_link([{"id": 1}], [{"source": 1, "target": 2}]),
            "edge 0 names the node '2', which is not there",
        ),
        (
            node_link([{"id": 1}, {"id": 2, "pos": [400, 0]}], [{"source": 1, "target": 2}]),
            "nothing gives a distance between site-1, site-2: add their coordinates or the edges' "
            "dist, or choose others with --sites",
        ),
        (
            node_link(
                [{"id": i, "name": n} for i, n in enumerate(("Paris", "Berlin", "Rom"))],
                [{"source": 0, "target": 1}],
            ),
            "the sites are in 2 parts that nothing connects both ways: choose those of one with "
            "--sites. paris, berlin; rom",
        ),
        ("<graphml>", "1:10 not XML: no element found"),
        ("<svg/>", "1:1 want GraphML, got <svg>"),
        ("<graphml/>", "want GraphML: there is no graph in it"),
        (
            '<!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><graphml>&b;</graphml>',
            "1:16 a document type (<!DOCTYPE …>) is not read: remove it",
        ),
        ("<graphml><graph/><graph/></graphml>", "1:18 a second graph: want only one"),
        (
            "<graphml><graph><hyperedge/></graph></graphml>",
            "1:17 a hyperedge joins more than two nodes: want edges",
        ),
        ("<graphml>" + "<a>" * 20, "1:55 nested deeper than 16 levels"),
        (
            "<graphml><graph><node id='a'/><edge source='a' target='b'/></graph></graphml>",
            "edge 0 names the node 'b', which is not there",
        ),
    ],
)
def test_what_cannot_be_used_is_told_with_its_cure(text: str, message: str) -> None:
    assert told(text) == message


def test_missing_speeds_unknown_sites_and_too_many_are_told() -> None:
    text = (MAPS / "backbone.json").read_text()
    speeds = told(text, Wishes())
    assert speeds == (
        "28 of 28 directed edges have no speed: give them one, as --bandwidth 10Gbit/s"
    )
    unknown = told(text, Wishes(bytes_per_s=1e9, sites=("seatle",)))
    assert unknown.startswith("--sites: no site 'seatle' (did you mean 'seattle'?); there are ")
    nodes = [{"id": i, "pos": [i, 0]} for i in range(70)]
    many = node_link(nodes, [{"source": i, "target": i + 1} for i in range(69)])
    assert told(many).startswith("70 nodes, and a topology has 64 sites at most: choose some with")


@pytest.mark.parametrize("seed", range(20))
def test_damaged_maps_raise_nothing_else(seed: int) -> None:
    generator = random.Random(seed)
    for name in ("backbone.json", "zoo.graphml"):
        text = list((MAPS / name).read_text())
        for _ in range(generator.randint(1, 8)):
            at = generator.randrange(len(text))
            text[at : at + generator.randint(0, 30)] = generator.choice(
                ["", "{", "]", "null", "<", "&", "\0", "-1", '"', "\ud800"]
            )
        print(f"{seed=}")
        with contextlib.suppress(ConfigError):
            import_topology("".join(text), name, TEN_GBIT)


def test_the_cities_are_on_earth_and_apart() -> None:
    assert len(cities()) >= 60
    assert list(cities()) == sorted(cities())
    for name, place in cities().items():
        assert nearest_city(place) is not None, name
        assert place_of(name.upper()) == place
    assert place_of("São Paulo") == cities()["Sao Paulo"]
    assert place_of("Atlantis") is None
    assert 3900 < great_circle_km(cities()["New York"], cities()["Los Angeles"]) < 3950


def test_names_are_valid_and_each_there_once() -> None:
    texts = ["São Paulo, BR", "sao paulo br", "", "東京", "x" * 100, "x" * 100, "-a_b-"]
    assert unique_names(texts) == [
        *("sao-paulo-br", "sao-paulo-br-2", "site", "site-2"),
        *("x" * 57, "x" * 57 + "-2", "a-b"),
    ]


def test_a_map_is_known_by_its_first_character() -> None:
    assert len(read_map(" \n" + (MAPS / "backbone.json").read_text(), "m").nodes) == 11
    assert len(read_map((MAPS / "zoo.graphml").read_text(), "m").edges) == 6
