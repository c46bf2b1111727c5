"""A small topology, and a fault script with everything in it, to be changed by tests."""

TOPOLOGY = """\
version: 1
name: chain
sites:
  - {name: east, nodes: 1, accelerators_per_node: 1, accelerator: cpu}
  - {name: middle, like: east}
  - {name: west, like: east}
links:
  - {between: [east, middle], bandwidth: 1Gbit/s, rtt: 20ms}
  - {between: [middle, west], bandwidth: 100Mbit/s, rtt: 40ms, loss: 0.1%, jitter: 1ms}
"""
SCRIPT = """\
version: 1
seed: 7
faults:
  - {at: 5s, link: [east, middle], rate: 10Mbit/s}
  - {at: 8s..10s, partition: [[east], [middle, west]], for: 3s}
  - {at: 12s, cut: [east, middle], oneway: true}
  - {at: 15s, flap: [middle, west], up: 300ms..1s, down: 100ms..400ms, for: 5s}
  - {at: 21s, heal: all}
  - {at: 22s, pause: west, for: 2s}
  - {at: 25s, reset: [east, middle]}
  - {at: 26s, reset: [middle, west]}
  - {at: 27s, pause: west, for: 1s..2s}
  - {at: 28s, heal: [east, middle], oneway: true}
"""
