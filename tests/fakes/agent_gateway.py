"""A gateway for agents: the protocols on stdin, stdout and the ranks' socket, and faults to order.

$FAKE_GATEWAY says what it does beside its duty: `fail` when all ranks have joined, `garbage`,
`exit` with status 3 when told to connect, `flood` of metrics, `stay` when told to leave, `mute`:
never listen.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from typing import Any

from isthmus.protos.limits import LOCAL_MESSAGE_BYTES

FAULT = os.environ.get("FAKE_GATEWAY", "")
FLOOD = 20_000


def say(**message: object) -> None:
    """Tell the agent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def fail(**failure: object) -> None:
    """Tell the agent that the gateway ends."""
    say(op="failed", failure=failure)


class Gateway:
    """Serves its ranks until its stdin ends."""

    def __init__(self, config: dict[str, Any]) -> None:
        index = config["sites"].index(config["site"])
        self.num_ranks = config["ranks_per_gateway"][index]
        self.ranks: dict[socket.socket, int] = {}
        self.left: set[int] = set()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(config["socket_path"])
        self.listener.listen(self.num_ranks)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)

    def serve(self) -> int:
        """Return the exit status."""
        if FAULT != "mute":
            say(op="listening", host="127.0.0.1", port=1)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    rank, _ = self.listener.accept()
                    self.selector.register(rank, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self.hear(key.fileobj)
                else:
                    line = os.read(0, LOCAL_MESSAGE_BYTES)
                    if not line:
                        if FAULT == "stay":
                            time.sleep(3600)  # as a hung process does: the agent must end it
                        return 0
                    if FAULT == "exit":
                        return 3
                    assert json.loads(line)["op"] == "connect"
                    say(op="connected")

    def hear(self, rank: socket.socket) -> None:
        """Handle one message of a rank, or its end."""
        data = rank.recv(LOCAL_MESSAGE_BYTES)
        message: dict[str, Any] = json.loads(data) if data else {"op": "gone"}
        match message.pop("op"):
            case "join":
                self.ranks[rank] = message["rank"]
                if len(self.ranks) == self.num_ranks:
                    self.all_joined()
            case "metric":
                say(op="metric", rank=self.ranks[rank], **message)
            case "digest":
                say(op="digest", rank=self.ranks[rank], **message)
            case "leave":
                self.left.add(self.ranks[rank])
                say(op="rank_left", rank=self.ranks[rank], round=0)
            case _:
                self.selector.unregister(rank)
                number = self.ranks.pop(rank)
                if number not in self.left:
                    text = f"rank {number} went away without leaving"
                    fail(code="RANK_LOST", message=text, rank=number, is_collateral=True)
                    sys.exit(1)

    def all_joined(self) -> None:
        """Say so, then do the harm that was ordered."""
        say(op="joined", ranks=sorted(self.ranks.values()))
        if FAULT == "garbage":
            sys.stdout.write("no json\n")
            sys.stdout.flush()
        if FAULT == "fail":
            text = "site c cannot be reached"
            fail(code="PEER_LOST", message=text, site="c")
            sys.exit(1)
        if FAULT == "flood":
            for step in range(FLOOD):
                values = {"loss": 1.0, "tokens": 2.0}
                say(op="metric", kind="step", rank=0, step=step, values=values, labels={})
        for rank in self.ranks:
            rank.send(b"go")


def main() -> int:
    """Read the configuration, then serve."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)  # unbuffered: the rest is polled for
    return Gateway(json.loads(line)).serve()


if __name__ == "__main__":
    sys.exit(main())
