"""Seeded mistakes in both documents: each is told at its line and column, in these words.

A case is what to replace in the right document, by what, and what must be told.
"""

import pytest

from tests.topology.documents import JOB, TOPOLOGY, changed, told

TOPOLOGY_MISTAKES: list[tuple[str, str, list[str]]] = [
    ("version: 1", "version: 2", ["1:10 want version: 1, got 2 [version]"]),
    ("version: 1\n", "", ["1:1 missing key 'version' []"]),
    (
        "name: tri-coast",
        "name: tri coast",
        ["2:7 want a name of letters, digits, '-' and '_', at most 63; got 'tri coast' [name]"],
    ),
    (
        "name: tri-coast",
        "nam: tri-coast\nname: x",
        ["2:1 unknown key 'nam' (did you mean 'name'?) [nam]"],
    ),
    ("name: tri-coast", "name: 5", ["2:7 want a text, got 5: write it in quotes [name]"]),
    (
        "bf16: 989TFLOP/s",
        "bf61: 989TFLOP/s",
        [
            "4:17 want 'fp64', 'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or 'int8', got 'bf61' (did you mean 'bf16'?) [accelerators.h100.peak.bf61]"
        ],
    ),
    (
        "bf16: 989TFLOP/s",
        "bf16: 989TFLOPS",
        [
            "4:23 unknown unit 'TFLOPS' (did you mean 'TFLOP/s'?): want a compute rate in FLOP/s, kFLOP/s, MFLOP/s, GFLOP/s, TFLOP/s, PFLOP/s, as 989TFLOP/s [accelerators.h100.peak.bf16]"
        ],
    ),
    (
        "peak: {bf16: 989TFLOP/s}",
        "peak: {}",
        ["4:16 want at least 1 of them, got 0 [accelerators.h100.peak]"],
    ),
    ("memory: 80GiB, ", "", ["4:9 missing key 'memory' [accelerators.h100]"]),
    (
        "memory: 80GiB",
        "memory: 80",
        [
            "4:44 want a size in B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, as 4MiB; got 80 without a unit [accelerators.h100.memory]"
        ],
    ),
    (
        "mfu: 0.42",
        "mfu: 42",
        ["4:56 want a share of 0 to 1, or 0% to 100%; got 42 [accelerators.h100.mfu]"],
    ),
    (
        "price: 2.5USD/h",
        "price: $2.5",
        ["4:69 want a price in USD/h, as 2.5USD/h; got '$2.5' [accelerators.h100.price]"],
    ),
    ("lat: 45.6", "lat: 145.6", ["7:21 want at most 90, got 145.6 [sites.0.location.lat]"]),
    ("nodes: 4", "nodes: no", ["8:12 want a whole number, got 'no' [sites.0.nodes]"]),
    ("nodes: 4", "nodes: 4.0", ["8:12 want a whole number, got 4.0 [sites.0.nodes]"]),
    ("nodes: 4", "nodes: 1e1", ["8:12 want a whole number, got 1e1 [sites.0.nodes]"]),
    ("nodes: 4", "nodes: 0", ["8:12 want at least 1, got 0 [sites.0.nodes]"]),
    (
        "nodes: 4",
        "nodes: 010",
        ["8:12 010 has a leading zero: write the number without it, or quote it [sites.0.nodes]"],
    ),
    ("    nodes: 4\n", "", ["6:5 missing key 'nodes' [sites.0]"]),
    (
        "accelerators_per_node: 8",
        "acelerators_per_node: 8",
        [
            "6:5 missing key 'accelerators_per_node' [sites.0]",
            "9:5 unknown key 'acelerators_per_node' (did you mean 'accelerators_per_node'?) [sites.0.acelerators_per_node]",
        ],
    ),
    (
        "accelerator: h100",
        "accelerator: h1000",
        ["10:18 unknown accelerator 'h1000' (did you mean 'h100'?) [sites.0.accelerator]"],
    ),
    (
        "cluster: 400Gbit/s",
        "cluster: 400Gbps",
        [
            "11:38 unknown unit 'Gbps' (did you mean 'Gbit/s'?): want a rate in bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s, B/s, kB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, GiB/s, TiB/s, as 1Gbit/s [sites.0.fabric.cluster]"
        ],
    ),
    (
        "latency: 8us",
        "latency: 8",
        [
            "11:58 want a duration in ns, us, ms, s, min, h, as 80ms; got 8 without a unit [sites.0.fabric.latency]"
        ],
    ),
    (
        "gateways_per_node: 1",
        "gateways_per_node: 3",
        [
            "12:30 3 gateways cannot divide the 8 ranks of a node evenly: want gateways_per_node to be one of 1, 2, 4, 8 [sites.0.wan.gateways_per_node]"
        ],
    ),
    (
        "nic: 100Gbit/s",
        "nic: 100Gbit/s, address: 10.0.0.7",
        [
            "12:58 '10.0.0.7' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [sites.0.wan.address]"
        ],
    ),
    (
        "nic: 100Gbit/s",
        "ports: 29600-29500",
        [
            "12:40 want ports from 1 to 65535, the lower one first; got '29600-29500' [sites.0.wan.ports]"
        ],
    ),
    (
        "nic: 100Gbit/s",
        "proxy: http://proxy.example:3128",
        [
            "12:40 would read all that the agent says: want security: {mode: mtls} [sites.0.wan.proxy]"
        ],
    ),
    (
        "nic: 100Gbit/s",
        "proxy: 'http://me:secret@proxy.example:3128'",
        [
            "12:40 want http://HOST:PORT; user and password only in $ISTHMUS_PROXY [sites.0.wan.proxy]",
            "12:40 would read all that the agent says: want security: {mode: mtls} [sites.0.wan.proxy]",
        ],
    ),
    (
        "nic: 100Gbit/s",
        "inbound: false, ports: 29500-29600",
        ["12:49 has no use with inbound: false [sites.0.wan.ports]"],
    ),
    (
        "nic: 100Gbit/s",
        "ports: 29500",
        ["12:40 want FIRST-LAST, as 29500-29600; got 29500 [sites.0.wan.ports]"],
    ),
    (
        "gateways_per_node: 1, nic: 100Gbit/s",
        "gateways_per_node: 4, ports: 29500-29502",
        ["12:40 want 4 ports or more, one for each gateway of a node; got 3 [sites.0.wan.ports]"],
    ),
    (
        "nic: 100Gbit/s",
        "address: '127.0.0.1:80'",
        [
            "12:42 want a host, as eu.example.org or ::1, without a port; got '127.0.0.1:80' [sites.0.wan.address]",
            "12:42 '127.0.0.1:80' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [sites.0.wan.address]",
        ],
    ),
    (
        "nic: 100Gbit/s",
        "bind: 10.0.0.7, interfaces: [eth7]",
        [
            "12:33 has no use with interfaces [sites.0.wan.bind]",
            "12:39 '10.0.0.7' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [sites.0.wan.bind]",
            "12:62 'eth7' is not lo: want security: {mode: mtls} [sites.0.wan.interfaces.0]",
        ],
    ),
    (
        "kind: local",
        "kind: kubernetes",
        [
            "13:22 'kubernetes' is not in this version: want 'local', 'ssh' or 'slurm' [sites.0.launcher.kind]"
        ],
    ),
    (
        "kind: local",
        "kind: loca",
        [
            "13:22 want 'local', 'ssh' or 'slurm', got 'loca' (did you mean 'local'?) [sites.0.launcher.kind]"
        ],
    ),
    (
        "kind: local",
        "host: x, options: [a]",
        [
            "13:16 has no use with kind: local [sites.0.launcher.host]",
            "13:25 has no use with kind: local [sites.0.launcher.options]",
        ],
    ),
    (
        "kind: local",
        "kind: ssh, jump: a b, port: 0",
        [
            "13:15 missing key 'host' [sites.0.launcher]",
            "13:33 want user@host:port (user and port may lack), got 'a b' [sites.0.launcher.jump]",
            "13:44 want at least 1, got 0 [sites.0.launcher.port]",
        ],
    ),
    (
        "kind: local",
        'kind: slurm, options: ["--comment=a\\n#SBATCH --uid=0\\ntouch /tmp/x"]',
        [
            "13:39 want one line without control characters, and it has '\\n' [sites.0.launcher.options.0]"
        ],
    ),
    (
        "kind: local",
        "kind: ssh, host: -oProxyCommand=x, user: -l, jump: -oX, python: -c, folder: -p",
        [
            "13:33 want a host, as eu.example.org or ::1, without a port; got '-oProxyCommand=x' [sites.0.launcher.host]",
            "13:57 cannot begin with '-': it would be read as an option; got '-l' [sites.0.launcher.user]",
            "13:67 want user@host:port (user and port may lack), got '-oX' [sites.0.launcher.jump]",
            "13:80 cannot begin with '-': it would be read as an option; got '-c' [sites.0.launcher.python]",
            "13:92 cannot begin with '-': it would be read as an option; got '-p' [sites.0.launcher.folder]",
        ],
    ),
    (
        "nic: 100Gbit/s",
        'address: "-x", bind: "a;b"',
        [
            "12:42 want a host, as eu.example.org or ::1, without a port; got '-x' [sites.0.wan.address]",
            "12:42 '-x' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [sites.0.wan.address]",
            "12:54 want a host, as eu.example.org or ::1, without a port; got 'a;b' [sites.0.wan.bind]",
            "12:54 'a;b' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [sites.0.wan.bind]",
        ],
    ),
    (
        "kind: local",
        "kind: slurm, key: k",
        ["13:29 has no use without host [sites.0.launcher.key]"],
    ),
    (
        "name: ohio",
        "name: oregon",
        [
            "15:12 duplicate site 'oregon' (first at line 6) [sites.2.name]",
            "18:25 unknown site 'ohio' [links.1.between.1]",
        ],
    ),
    (
        "like: virginia",
        "like: virginai",
        ["15:24 unknown site 'virginai' (did you mean 'virginia'?) [sites.2.like]"],
    ),
    (
        "like: virginia",
        "like: ohio",
        ["15:24 sites are like each other in a circle: ohio -> ohio [sites.2.like]"],
    ),
    (
        "[oregon, virginia]",
        "[oregon, virgina]",
        ["17:24 unknown site 'virgina' (did you mean 'virginia'?) [links.0.between.1]"],
    ),
    (
        "[oregon, virginia]",
        "[oregon, oregon]",
        ["17:24 a link from 'oregon' to itself [links.0.between.1]"],
    ),
    ("[oregon, virginia]", "[oregon]", ["17:15 want at least 2 of them, got 1 [links.0.between]"]),
    ("[oregon, virginia]", "oregon", ["17:15 want a list, got 'oregon' [links.0.between]"]),
    (
        "[virginia, ohio]",
        "[virginia, oregon]",
        [
            "16:1 no links in both directions connect 'oregon' with 'ohio' [links]",
            "18:14 a second link from 'virginia' to 'oregon' (first at line 17) [links.1.between]",
        ],
    ),
    (
        "between: [virginia, ohio]",
        "between: [virginia, ohio]\n    oneway: true",
        ["16:1 no links in both directions connect 'oregon' with 'ohio' [links]"],
    ),
    (
        "bandwidth: 10Gbit/s",
        "bandwidth: 0Gbit/s",
        ["17:46 must be more than 0, got '0Gbit/s' [links.0.bandwidth]"],
    ),
    (
        "bandwidth: 10Gbit/s",
        "bandwidth: -10Gbit/s",
        ["17:46 must not be negative: '-10Gbit/s' [links.0.bandwidth]"],
    ),
    ("bandwidth: 10Gbit/s, ", "", ["17:5 missing key 'bandwidth' [links.0]"]),
    (
        "rtt: 62ms",
        "rtt: 62",
        [
            "17:61 want a duration in ns, us, ms, s, min, h, as 80ms; got 62 without a unit [links.0.rtt]"
        ],
    ),
    (
        "rtt: 62ms",
        "rtt_ms: 62ms",
        ["17:56 unknown key 'rtt_ms' (did you mean 'rtt'?) [links.0.rtt_ms]"],
    ),
    ("rtt: 62ms", "rtt:", ["17:56 'rtt' has no value: give it one, or remove it [links.0.rtt]"]),
    (
        "rtt: 62ms",
        "rtt: 6s",
        [
            "28:26 want more than 18s, three times the RTT from 'oregon' to 'virginia'; got 15s [failure.detect_within]"
        ],
    ),
    (
        "loss: 0.001%",
        "loss: 2",
        ["17:73 want a share of 0 to 1, or 0% to 100%; got 2 [links.0.loss]"],
    ),
    (
        "loss: 0.001%",
        "loss: 100%",
        [
            "17:73 a link that loses every packet carries nothing: want less than 100%. Leave the "
            "link out, or cut it for a time with a fault script (cut: [a, b]) [links.0.loss]"
        ],
    ),
    (
        "max_flows: 64",
        "max_flows: '64'",
        ["22:16 want a whole number, got '64' [links.1.max_flows]"],
    ),
    ("share: 0.8", "share: 0", ["24:12 must be more than 0 [links.1.share]"]),
    (
        "from: 08:00",
        "from: 8 am",
        ["25:23 want a time of day as 08:00, got '8 am' [links.1.schedule.0.from]"],
    ),
    ("to: 18:00", "to: 08:00", ["25:34 want another time than from [links.1.schedule.0.to]"]),
    (
        "at: 2026-05-01T12:00:00Z",
        "at: yesterday",
        ["26:53 want a time as 2026-05-01T12:00:00Z, got 'yesterday' [links.1.measured.at]"],
    ),
    (
        "site: oregon,",
        "site: orgon,",
        ["27:21 unknown site 'orgon' (did you mean 'oregon'?) [coordinator.site]"],
    ),
    (
        "bind: 127.0.0.1:7443",
        "bind: 7443",
        ["27:35 want HOST:PORT, as 127.0.0.1:7443; got 7443 [coordinator.bind]"],
    ),
    (
        "bind: 127.0.0.1:7443",
        "bind: 0.0.0.0:7443",
        [
            "27:35 '0.0.0.0' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [coordinator.bind]"
        ],
    ),
    (
        "min_sites: 2",
        "min_sites: 4",
        ["28:42 want at most 3, the number of sites; got 4 [failure.min_sites]"],
    ),
    (
        "detect_within: 15s",
        "detect_within: 15s, start_within: 10s",
        [
            "28:45 start_within (10 s) must be longer than detect_within (15 s) [failure.start_within]"
        ],
    ),
    (
        "detect_within: 15s",
        "detect_within: 15",
        [
            "28:26 want a duration in ns, us, ms, s, min, h, as 80ms; got 15 without a unit [failure.detect_within]"
        ],
    ),
    (
        "detect_within: 15s",
        "detect_within: 100ms",
        ["28:26 want at least 0.5 s, got 0.1 s [failure.detect_within]"],
    ),
    (
        "mode: insecure",
        "mode: tls",
        ["29:18 want 'insecure' or 'mtls', got 'tls' (did you mean 'mtls'?) [security.mode]"],
    ),
    (
        "mode: insecure",
        "mode: insecure, ca: certs/ca.pem",
        ["29:28 has no use with mode: insecure [security.ca]"],
    ),
    ("emulate: true", "emulate: yes", ["30:10 want true or false, got 'yes' [emulate]"]),
    (
        "emulate: true",
        "emulate: true\nname: again",
        ["31:1 duplicate key 'name' (first at line 2) [name]"],
    ),
    (
        "bind: 127.0.0.1:7443",
        "address: 10.0.0.7:0",
        [
            "27:38 want the port that others dial, not 0 [coordinator.address]",
            "27:38 '10.0.0.7' is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {mode: mtls} [coordinator.address]",
        ],
    ),
    (
        "coordinator:",
        "coordinater:",
        ["27:1 unknown key 'coordinater' (did you mean 'coordinator'?) [coordinater]"],
    ),
    (
        "  - {name: ohio, like: virginia, nodes: 2}",
        "  - ohio",
        [
            "15:5 want a mapping, got 'ohio' [sites.2]",
            "18:25 unknown site 'ohio' [links.1.between.1]",
        ],
    ),
    (
        "location: {lat: 39.0, lon: -77.5}",
        "location: [39.0, -77.5]",
        ["14:46 want a mapping, got a list [sites.1.location]"],
    ),
    (
        "    distance: 500km\n    egress: 0.02USD/GB\n    max_flows: 64\n    window: 16MiB\n    share: 0.8\n    schedule: [{from: 08:00, to: 18:00, share: 0.5}]\n    measured: {bandwidth: 0.9Gbit/s, rtt: 14ms, at: 2026-05-01T12:00:00Z}\n",
        "",
        [
            "18:5 nothing gives an RTT: want rtt, distance, measured.rtt, or a location of 'ohio' [links.1]"
        ],
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), TOPOLOGY_MISTAKES)
def test_a_mistake_in_a_topology_is_told_at_its_place(
    old: str, new: str, expected: list[str]
) -> None:
    assert told("topology", changed(TOPOLOGY, old, new)) == expected


def test_the_documents_that_the_mistakes_are_made_in_are_right() -> None:
    assert told("topology", TOPOLOGY) == []
    assert told("job", JOB) == []
