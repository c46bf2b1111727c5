"""Right documents: what they resolve to."""

import dataclasses

import pytest

from isthmus.topology.documents.load import document_kind, load_job, load_topology, split_overrides
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Data, Exchange, Job, Model, Optimizer, Reduction, Trainer
from isthmus.topology.spec.world import (
    MAX_SITES,
    CrossTraffic,
    Detection,
    Emulation,
    Endpoint,
    Link,
    Period,
    PortRange,
    Queue,
)
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.topology.documents import JOB, TOPOLOGY, changed, told

TWO_SITES = """\
version: 1
name: pair
sites:
  - {name: a, nodes: 1, accelerators_per_node: 2, accelerator: cpu}
  - {name: b, like: a}
links:
  - {between: [a, b], bandwidth: 80Mbit/s, rtt: 20ms}
"""


def link(text: str, source: str = "a", target: str = "b") -> Link:
    """Return one direction of a topology's link."""
    found = load_topology(text, "t.yaml").link(source, target)
    assert found is not None
    return found


def test_the_whole_sketch_is_read_in_base_units() -> None:
    topology = load_topology(TOPOLOGY, "tri.yaml")
    oregon, virginia, ohio = topology.sites
    assert [(each.name, each.index, each.num_ranks) for each in topology.sites] == [
        ("oregon", 0, 32),
        ("virginia", 1, 32),
        ("ohio", 2, 16),
    ]
    assert oregon.accelerator.peak_flops_per_s == {"bf16": 989e12}
    assert oregon.accelerator.memory_bytes == 80 << 30
    assert oregon.accelerator.price_usd_per_h == 2.5
    assert oregon.fabric is not None
    assert oregon.fabric.cluster_bytes_per_s == 50e9
    assert oregon.nic_bytes_per_s == virginia.nic_bytes_per_s == ohio.nic_bytes_per_s == 12.5e9
    assert ohio.accelerator == oregon.accelerator
    assert topology.coordinator.bind == Endpoint(host="127.0.0.1", port=7443)
    assert topology.coordinator.site == "oregon"
    assert topology.failure == Detection(detect_within_s=15, min_sites=2, start_within_s=120)
    assert topology.emulate
    assert len(topology.links) == 4


def test_conditions_of_an_emulation_and_what_a_run_is_told() -> None:
    written = (
        "emulation: {described: 2.0, queue: 0.5BDP, congestion: bbr, "
        "cross_traffic: {flows: 3, congestion: cubic}}\n"
    )
    topology = load_topology(TWO_SITES + written, "t.yaml")
    assert topology.emulation == Emulation(
        described=2.0,
        queue=Queue(bdp=0.5),
        congestion="bbr",
        cross_traffic=CrossTraffic(flows=3, congestion="cubic"),
    )
    assert [each.bytes_per_s for each in topology.links] == [20e6, 20e6]
    in_bytes = load_topology(TWO_SITES, "t.yaml", ["emulation.queue=256KiB"])
    assert in_bytes.emulation == Emulation(queue=Queue(num_bytes=256 << 10))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("emulation.queue=0.5", "want 0.5BDP"),
        ("emulation.queue=0BDP", "must be more than 0"),
        ("emulation.queue=-1BDP", "must not be negative"),
        ("emulation.described=0", "want more than 0, got 0"),
        ("emulation.congestion=cubik", "want 'cubic', 'reno' or 'bbr', got 'cubik' (did you mean"),
        ("links.0.congestion=vegas", "want 'cubic', 'reno' or 'bbr', got 'vegas'"),
        ("emulation.cross_traffic.flows=33", "want at most 32, got 33"),
    ],
)
def test_conditions_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_topology(TWO_SITES, "t.yaml", [override])
    assert message in str(caught.value)


def test_measured_figures_win_and_the_share_multiplies() -> None:
    topology = load_topology(TOPOLOGY, "tri.yaml")
    there, back = topology.link("virginia", "ohio"), topology.link("ohio", "virginia")
    assert there is not None
    assert there.bytes_per_s == pytest.approx(0.9e9 / 8 * 0.8)
    assert (there.rtt_s, there.rtt_origin) == (0.014, "measured")
    assert there.egress_usd_per_byte == 2e-11
    assert (there.max_flows, there.window_bytes, there.share) == (64, 16 << 20, 0.8)
    assert there.schedule == (Period(start_minute=480, end_minute=1080, share=0.5),)
    assert there.measured_at == "2026-05-01T12:00:00Z"
    assert there.distance_km == 500
    assert back == dataclasses.replace(there, ends=("ohio", "virginia"))


def test_what_is_absent_has_a_default() -> None:
    topology = load_topology(TWO_SITES, "t.yaml")
    assert topology.failure == Detection(detect_within_s=15, start_within_s=120)
    assert topology.coordinator.bind == Endpoint(host="127.0.0.1", port=0)
    assert not topology.emulate
    assert [site.dialled for site in topology.sites] == ["127.0.0.1", "127.0.0.1"]
    assert topology.sites[0].accelerator.name == "cpu"
    assert link(TWO_SITES).share == 1.0


def test_a_file_may_say_for_itself_what_cpu_is() -> None:
    own = TWO_SITES + "accelerators: {cpu: {peak: {fp32: 1TFLOP/s}, memory: 1GiB, mfu: 50%}}\n"
    assert load_topology(own, "t.yaml").sites[1].accelerator.peak_flops_per_s == {"fp32": 1e12}


@pytest.mark.parametrize(
    ("figures", "rtt_s", "origin"),
    [
        ("rtt: 20ms, distance: 2000km, measured: {rtt: 30ms}", 0.03, "measured"),
        ("rtt: 20ms, distance: 2000km", 0.02, "rtt"),
        ("distance: 2000km", 2 * 2000 * 4.9e-6 * 1.6, "distance"),
        ("distance: 1000km", 2 * 1000 * 4.9e-6 * 2.2, "distance"),
        ("egress: 1USD/GB", pytest.approx(0.0567, abs=0.0002), "locations"),
    ],
)
def test_an_rtt_comes_from_the_best_figure_there_is(
    figures: str, rtt_s: float, origin: str
) -> None:
    text = changed(TWO_SITES, "rtt: 20ms", figures)
    text = changed(
        text, "{name: b, like: a}", "{name: b, like: a, location: {lat: 39.0, lon: -77.5}}"
    )
    text = changed(text, "{name: a, ", "{name: a, location: {lat: 45.6, lon: -121.2}, ")
    assert (link(text).rtt_s, link(text).rtt_origin) == (rtt_s, origin)


def test_a_location_is_not_taken_over_by_a_site_like_another() -> None:
    text = changed(TWO_SITES, "{name: a, ", "{name: a, location: {lat: 1, lon: 2}, ")
    assert told("topology", changed(text, ", rtt: 20ms", "")) == [
        "7:5 nothing gives an RTT: want rtt, distance, measured.rtt, or a location of 'b' [links.0]"
    ]


def test_an_address_is_not_taken_over_but_the_rest_of_the_wan_is() -> None:
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {address: 127.0.0.2, nic: 8Gbit/s}, ")
    text = changed(text, "like: a", "like: a, wan: {address: '::1'}")
    sites = load_topology(text, "t.yaml").sites
    assert [site.dialled for site in sites] == ["127.0.0.2", "::1"]
    assert [site.nic_bytes_per_s for site in sites] == [1e9, 1e9]


def test_what_is_bound_may_differ_from_what_others_dial() -> None:
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {address: eu.example, bind: '::'}, ")
    text = changed(text, "like: a", "like: a, wan: {interfaces: [ens5, ens6], ports: 29500-29600}")
    text += "coordinator: {bind: '[::1]:7443', address: 'c.example:443'}\n"
    topology = load_topology(text, "t.yaml", ["security.mode=mtls"])
    one, other = topology.sites
    assert (one.dialled, one.bind) == ("eu.example", "::")
    assert (other.dialled, other.interfaces) == ("", ("ens5", "ens6"))
    assert other.ports == PortRange(first=29500, last=29600)
    assert (str(topology.coordinator.bind), str(topology.coordinator.dialled)) == (
        "[::1]:7443",
        "c.example:443",
    )


def test_what_binds_every_address_has_one_that_others_dial() -> None:
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {bind: 0.0.0.0}, ")
    assert told("topology", text, "security.mode=mtls") == [
        "4:27 binds every address of the machine: want address, that others can dial "
        "[sites.0.wan.bind]"
    ]
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {address: '[::]'}, ")
    assert told("topology", text, "security.mode=mtls") == [
        "4:30 nobody can dial every address: want one here, and bind: with this "
        "[sites.0.wan.address]"
    ]


def test_of_two_sites_with_a_link_one_can_be_dialled() -> None:
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {inbound: false}, ")
    assert [site.inbound for site in load_topology(text, "t.yaml").sites] == [False, True]
    text = changed(text, "like: a", "like: a, wan: {inbound: false}")
    assert told("topology", text) == [
        "7:15 neither 'a' nor 'b' can be dialled (inbound: false): leave the link out, and trees "
        "go around it [links.0.between]"
    ]


def test_gateways_divide_a_nodes_ranks_and_are_taken_over() -> None:
    assert [site.num_gateways for site in load_topology(TWO_SITES, "t.yaml").sites] == [1, 1]
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {gateways_per_node: 2}, ")
    text = changed(text, "like: a}", "like: a, nodes: 3, accelerators_per_node: 8}")
    sites = load_topology(text, "t.yaml").sites
    assert [(site.num_gateways, site.ranks_per_gateway) for site in sites] == [(2, 1), (6, 4)]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("sites.1.accelerators_per_node=3", "sites.1.accelerators_per_node"),
        ("sites.1.wan.gateways_per_node=4", "sites.1.wan.gateways_per_node"),
    ],
)
def test_ranks_that_gateways_cannot_divide_are_told_where_that_is_said(
    override: str, path: str
) -> None:
    text = changed(TWO_SITES, "{name: a, ", "{name: a, wan: {gateways_per_node: 2}, ")
    with pytest.raises(ConfigError) as caught:
        load_topology(text, "t.yaml", [override])
    [problem] = caught.value.problems
    assert problem.path == path
    assert "want gateways_per_node to be one of 1, " in problem.message


def test_oneway_links_may_differ_by_direction() -> None:
    text = changed(TWO_SITES, "rtt: 20ms}", "rtt: 20ms, oneway: true}")
    text += "  - {between: [b, a], bandwidth: 8Mbit/s, rtt: 20ms, oneway: true}\n"
    assert link(text).bytes_per_s == 10e6
    assert link(text, "b", "a").bytes_per_s == 1e6


def test_one_site_needs_no_links() -> None:
    text = TWO_SITES[: TWO_SITES.index("  - {name: b")]
    assert load_topology(text, "t.yaml").num_ranks == 2


@pytest.mark.slow
def test_a_full_mesh_of_as_many_sites_as_there_may_be_fits_with_every_figure() -> None:
    lines = TWO_SITES.split("\n")[:3]
    names = [f"s{index}" for index in range(MAX_SITES)]
    lines += [
        f"  - {{name: {name}, nodes: 1, accelerators_per_node: 1, accelerator: cpu}}"
        for name in names
    ]
    lines.append("links:")
    lines += [
        f"  - {{between: [{one}, {other}], bandwidth: 1Gbit/s, rtt: 9ms, loss: 0.1%, jitter: 1ms, "
        "egress: 0.02USD/GB, max_flows: 8, window: 1MiB, share: 0.5, "
        "measured: {bandwidth: 1Gbit/s, rtt: 9ms, at: 2026-05-01T12:00:00Z}}"
        for index, one in enumerate(names)
        for other in names[index + 1 :]
    ]
    assert len(load_topology("\n".join(lines), "t.yaml").links) == 64 * 63


def test_a_job_is_read_in_base_units_and_keeps_the_other_defaults() -> None:
    assert load_job(JOB, "job.yaml") == Job(
        name="small",
        topology="topology.yaml",
        exchange=Exchange(
            codec="bf16", chunk_bytes=256 << 10, bucket_bytes=1 << 20, window_bytes=8 << 20
        ),
        reduction=Reduction(tree="star", hub="virginia"),
        verify_every=5,
        trainer=Trainer(
            steps=20,
            global_batch=96,
            model=Model(layers=2, heads=2, width=64),
            data=Data(files=("*.txt",), held_out=0.1),
            optimizer=Optimizer(learning_rate=1e-3),
        ),
    )


def test_the_shortest_job_has_every_default() -> None:
    text = "version: 1\nname: j\ntopology: t.yaml\n"
    assert load_job(text, "job.yaml") == Job(name="j", topology="t.yaml")


def test_a_document_tells_what_it_is() -> None:
    assert document_kind(read_with_overrides(TOPOLOGY, "x", ())) == "topology"
    assert document_kind(read_with_overrides(JOB, "x", ())) == "job"
    assert document_kind(read_with_overrides("sites: []\nlinkz: []\n", "x", ())) == "topology"
    with pytest.raises(ConfigError, match="neither a topology"):
        document_kind(read_with_overrides("version: 1\nname: x\n", "x", ()))
    with pytest.raises(ConfigError, match="want a mapping"):
        document_kind(read_with_overrides("- sites\n", "x", ()))


def test_overrides_go_where_their_first_key_belongs() -> None:
    mixed = ["links.0.rtt=1ms", "trainer.steps=3", "emulate=true", "topology=b.yaml", "name=x"]
    assert split_overrides(mixed) == (
        ["links.0.rtt=1ms", "emulate=true"],
        ["trainer.steps=3", "topology=b.yaml", "name=x"],
    )
