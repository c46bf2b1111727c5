"""A user's script without torch: joins the node's gateway, does what its arguments say, and ends.

Arguments: ACTION [RANK [OTHERS]]. Without a rank all do it; the other ranks do what OTHERS says, or
wait until they are killed.
Actions: absent (never joins), done (prints its environment, too), exit, raise, kill, wait, ignore
(SIGTERM), talk (a long log), lost (another site), quit (status 0 without leaving), victim (once
another has ended).
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
GONE = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "gone"
"""There once a rank of this node is about to end; has its process id."""


def join() -> socket.socket:
    """Join the gateway and wait until all ranks have."""
    gateway = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets = os.environ["ISTHMUS_GATEWAY"].split(":")
    local_rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gateway.connect(sockets[local_rank * len(sockets) // num_ranks])
    say(
        gateway,
        op="join",
        rank=RANK,
        local_rank=local_rank,
        pid=os.getpid(),
        generation=int(os.environ["ISTHMUS_GENERATION"]),
    )
    gateway.recv(1 << 16)
    return gateway


def say(gateway: socket.socket, **message: object) -> None:
    """Send the gateway one message."""
    gateway.send(json.dumps(message).encode())


def act(action: str, gateway: socket.socket) -> None:
    """Do as ordered."""
    match action:
        case "done":
            say(gateway, op="metric", kind="step", step=1, values={"loss": 2.5}, labels={})
            say(gateway, op="digest", step=1, round=0, combined=7, tensors=[7], names=["w"])
            print(json.dumps(dict(os.environ)), flush=True)
            print(f"rank {RANK} done in {os.environ['ISTHMUS_SITE']}", flush=True)
            say(gateway, op="leave")
            _tell_gone()
        case "exit":
            print("exiting with 17", file=sys.stderr, flush=True)
            sys.exit(17)
        case "raise":
            raise ValueError("a mistake in the script")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            wait()
        case "talk":
            for line in range(30_000):  # 3 MB at once: several times what is shipped in a second
                print(f"line {line} {'.' * 100}", flush=False)
            print("x" * 20_000)
            sys.stdout.flush()
            raise RuntimeError("the last words")
        case "quit":
            _tell_gone()
            os._exit(0)
        case "victim":
            from isthmus.protos.errors import RankLostError

            while not GONE.exists() or _is_alive(int(GONE.read_text())):
                time.sleep(0.01)
            raise RankLostError("a collective inside the site failed: Connection closed by peer")
        case "lost":
            from isthmus.protos.errors import PeerLostError

            raise PeerLostError("site b does not answer", "b")
        case _:
            wait()


def _tell_gone() -> None:
    written = GONE.with_suffix(f".{RANK}")
    written.write_text(str(os.getpid()))
    written.rename(GONE)


def _is_alive(pid: int) -> bool:
    """Whether a process has not ended yet; its parent may not have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait() -> None:
    """Wait for the end."""
    print(f"rank {RANK} waits", flush=True)
    threading.Event().wait(600)


if __name__ == "__main__":
    chosen = len(sys.argv) < 3 or int(sys.argv[2]) == RANK
    if sys.argv[1] != "absent":
        others = sys.argv[3] if len(sys.argv) > 3 else "wait"
        act(sys.argv[1] if chosen else others, join())
