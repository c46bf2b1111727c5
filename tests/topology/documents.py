"""A small topology and job with everything in them, to be changed by tests."""

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.spec.errors import ConfigError

TOPOLOGY = """\
version: 1
name: tri-coast
accelerators:
  h100: {peak: {bf16: 989TFLOP/s}, memory: 80GiB, mfu: 0.42, price: 2.5USD/h}
sites:
  - name: oregon
    location: {lat: 45.6, lon: -121.2}
    nodes: 4
    accelerators_per_node: 8
    accelerator: h100
    fabric: {node: 450GB/s, cluster: 400Gbit/s, latency: 8us}
    wan: {gateways_per_node: 1, nic: 100Gbit/s}
    launcher: {kind: local}
  - {name: virginia, like: oregon, location: {lat: 39.0, lon: -77.5}}
  - {name: ohio, like: virginia, nodes: 2}
links:
  - {between: [oregon, virginia], bandwidth: 10Gbit/s, rtt: 62ms, loss: 0.001%, jitter: 1ms}
  - between: [virginia, ohio]
    bandwidth: 1Gbit/s
    distance: 500km
    egress: 0.02USD/GB
    max_flows: 64
    window: 16MiB
    share: 0.8
    schedule: [{from: 08:00, to: 18:00, share: 0.5}]
    measured: {bandwidth: 0.9Gbit/s, rtt: 14ms, at: 2026-05-01T12:00:00Z}
coordinator: {site: oregon, bind: 127.0.0.1:7443}
failure: {detect_within: 15s, min_sites: 2}
security: {mode: insecure}
emulate: true
"""

JOB = """\
version: 1
name: small
topology: topology.yaml
exchange: {codec: bf16, chunk: 256KiB, bucket: 1MiB, window: 8MiB}
reduction: {tree: star, hub: virginia}
verify: {parameters_every: 5}
trainer:
  steps: 20
  global_batch: 96
  model: {layers: 2, heads: 2, width: 64}
  data: {files: ["*.txt"], held_out: 10%}
  optimizer: {learning_rate: 1e-3}
"""


def changed(text: str, old: str, new: str) -> str:
    """Return `text` with its only `old` replaced."""
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    return text.replace(old, new)


def told(kind: str, text: str, *overrides: str) -> list[str]:
    """Return `line:column message [path]` of each problem of a document; [] if it is right."""
    load = load_topology if kind == "topology" else load_job
    try:
        load(text, f"{kind}.yaml", overrides)
    except ConfigError as error:
        return [
            f"{each.line}:{each.column} {each.message} [{each.path}]" for each in error.problems
        ]
    return []
