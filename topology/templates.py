"""The two files that `isthmus init` writes: they run as they are, and say what everything is."""

from pathlib import Path

SCHEMA_FOLDER = Path(__file__).resolve().parent
"""Where the JSON Schemas of this installation are."""

_TOPOLOGY = """\
# Three data centers joined by a WAN, emulated on this machine: two processes on CPUs in each.
# Figures carry units: 80ms, 1Gbit/s, 4MiB, 0.01%, 900km. `isthmus validate topology.yaml` checks them.
version: 1
name: three-coasts

# What computes. For GPUs: h100: {peak: {bf16: 989TFLOP/s}, memory: 80GiB, mfu: 0.42, price: 2.5USD/h}
accelerators:
  cpu:
    peak: {fp32: 50GFLOP/s} # of one core
    memory: 4GiB
    mfu: 0.3                # share of the peak that a training step reaches

sites:
  - name: oregon
    location: {lat: 45.6, lon: -121.2}
    nodes: 1
    accelerators_per_node: 2   # one training process (rank) each
    accelerator: cpu
  - name: virginia
    like: oregon               # the same but for what stands here; a location is never taken over
    location: {lat: 39.0, lon: -77.5}
  - name: montreal
    like: oregon
    location: {lat: 45.5, lon: -73.6}

# The WAN. A link is full duplex: each direction has this bandwidth (`oneway: true` for one of them).
# Without rtt it is derived from `distance`, or from the locations.
links:
  - {between: [oregon, virginia], bandwidth: 200Mbit/s, rtt: 62ms, jitter: 1ms}
  - {between: [virginia, montreal], bandwidth: 500Mbit/s, rtt: 15ms}
  - {between: [oregon, montreal], bandwidth: 100Mbit/s, rtt: 70ms, jitter: 2ms}

# What crosses between sites is delayed and slowed down on this machine as the links say.
emulate: true

failure:
  detect_within: 15s  # a dead site, process or path ends the run within this; all timeouts follow from it
  start_within: 120s  # every site is up within this, or all are stopped again
  min_sites: 3

security: {mode: insecure} # no TLS yet, and therefore loopback addresses only
"""

_JOB = """\
# One training run: the small language model that ships, learning Python's standard library byte by byte.
version: 1
name: hello-wan
topology: topology.yaml # relative to this file

# Your own script instead (it calls sites.join() and site.synchronize(model, optimizer)):
# entrypoint: train.py
# arguments: [--epochs, "3"]

# How gradients cross the WAN.
exchange:
  codec: bf16-split     # lossless: fp32, split; lossy: bf16, bf16-split, int8, fp8, int4, topk
  chunk: 256KiB         # unit of sending, checking and summing, in float32
  bucket: 1MiB          # gradients that start crossing together, while backward goes on
  channels_per_link: 2  # TCP connections between two sites

# Where sums are formed: auto (by the links) | gather (every site sends to all) | star (optionally with
# hub: SITE) | ring | hierarchy (optionally with groups: [[SITE, SITE], ..]); or trees of your own.
reduction: {tree: auto}

# Every so many steps all parameters of all sites are compared, bit for bit.
verify: {parameters_every: 10}

trainer:
  steps: 150
  global_batch: 48      # sequences a step, over all ranks of all sites
  micro_batch: 8        # of them at once through the model
  evaluate_every: 50
  model: {layers: 4, heads: 4, width: 128, context: 128}
  optimizer: {learning_rate: 6e-3, min_learning_rate: 6e-4, warmup_steps: 20}
"""


def topology_yaml(schema_folder: Path = SCHEMA_FOLDER) -> str:
    """Return a commented topology: three emulated sites with two CPU ranks each."""
    return _headed("topology", _TOPOLOGY, schema_folder)


def job_yaml(schema_folder: Path = SCHEMA_FOLDER) -> str:
    """Return a commented job for it, which lies beside it as `topology.yaml`."""
    return _headed("job", _JOB, schema_folder)


def _headed(kind: str, text: str, schema_folder: Path) -> str:
    schema = schema_folder / f"{kind}.schema.json"
    return f"# yaml-language-server: $schema={schema.as_uri()}\n{text}"
