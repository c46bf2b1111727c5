"""Data parallel groups that exchange directly, each device sending to one other after another.

Pure.

The cost model of Yuan et al., "Decentralized training of foundation models in heterogeneous
environments" (NeurIPS 2022, equations 2 to 4): a group of D devices is a sharded parameter server,
so each sends its part of the gradient, c / D bytes, to each other one, and does so again with the
results. A message keeps its sender for delay + bytes / rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topology.simulator.engine import Engine, Server

Message = Callable[[int, int, float], float]
"""The seconds of a message from one device to another, of so many bytes."""


def exchange_s(group: Sequence[int], num_bytes: float, message_s: Message) -> float:
    """Return how long a group takes for `num_bytes` of gradients.

    Args:
        group: devices.
        num_bytes: that each has.
        message_s: of two devices, and bytes.
    """
    engine = Engine()
    part = num_bytes / len(group)

    def send(device: int, phase: int, sender: Server) -> None:
        """Send a device's parts of a phase, then go on to the next phase."""
        done_s = engine.now_s
        for other in group:
            if other != device:
                took_s = message_s(device, other, part)
                _, done_s = sender.serve(engine.now_s, engine.now_s, took_s, took_s)
        if phase == 0:
            engine.at(done_s, send, device, 1, sender)
        else:
            engine.at(done_s, _nothing)

    for device in group:
        engine.at(0.0, send, device, 0, Server())
    engine.run()
    return engine.now_s


def relay_s(groups: Sequence[Sequence[int]], num_bytes: float, message_s: Message) -> float:
    """Return how long activations take through groups in order, slowest pair after slowest pair.

    Device i of a group sends to device i of the next.

    Args:
        groups: of equal size, in the order of the pipeline.
        num_bytes: of one message.
        message_s: of two devices, and bytes.
    """
    engine = Engine()

    def reach(stage: int) -> None:
        if stage + 1 < len(groups):
            pairs = zip(groups[stage], groups[stage + 1], strict=True)
            slowest_s = max(message_s(one, other, num_bytes) for one, other in pairs)
            engine.at(engine.now_s + slowest_s, reach, stage + 1)

    engine.at(0.0, reach, 0)
    engine.run()
    return engine.now_s


def _nothing() -> None:
    """Be an end that the clock reaches."""
