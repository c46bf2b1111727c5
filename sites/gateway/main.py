"""The gateway's process: executes the agent's commands and ends with it.

stdout carries the protocol and nothing else; the log goes to stderr.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from typing import Final

from isthmus.protos.errors import IsthmusError, LocalProtocolError, failure_of
from isthmus.protos.failure import Failure, one_line, text_of
from isthmus.protos.security import exchange_security
from isthmus.sites.compiled import note_of_plain
from isthmus.sites.gateway.agent_port import (
    AgentWriter,
    Cancel,
    Command,
    Connect,
    Resume,
    Revoke,
    Settle,
    read_commands,
    read_configuration,
)
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.gateway import Gateway
from isthmus.sites.gateway.links.transport import Peer
from isthmus.sites.gateway.probing.probing_gateway import ProbingGateway
from isthmus.sites.local.rank_messages import Failed
from isthmus.topology.spec.errors import ConfigError

_log = logging.getLogger(__name__)

_EXIT_DEADLINE_S: Final = 10.0
_SWITCH_S: Final = 0.0005
"""The interpreter's switch interval. Frames pass from thread to thread: with the default of 5 ms,
each hand-over would take as long as a round trip."""
_CHECK_S: Final = 0.5
"""Poll interval of the main thread. A signal delivered to another thread does not wake it, and is
handled at its next poll."""


def main() -> int:
    """Run one gateway; return its exit status: 0 after the agent's end of file, 1 after a failure.

    An invalid command of the agent is a failure too, and named in the `failed` line.
    """
    sys.setswitchinterval(_SWITCH_S)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(threadName)s: %(message)s",
        stream=sys.stderr,
    )
    if note := note_of_plain():
        _log.warning("%s", note)
    # Unbuffered: at exit a thread still waits in a read, and would hold a buffer's lock.
    stdin = io.FileIO(sys.stdin.fileno(), closefd=False)
    agent = AgentWriter(sys.stdout.buffer)
    agent.start()
    try:
        config = read_configuration(stdin)
        if config is None:
            return 0
        return _run(config, stdin, agent)
    except IsthmusError as error:
        return _refuse(agent, failure_of(error))
    except ConfigError as error:
        return _refuse(agent, Failure(code="INVALID_CONFIG", message=one_line(str(error))))
    except OSError as error:
        return _refuse(agent, Failure(code="LAUNCH_FAILED", message=one_line(text_of(error))))
    finally:
        agent.close()


def _run(config: GatewayConfig, stdin: io.FileIO, agent: AgentWriter) -> int:
    if config.revoked:
        exchange_security(config.site).take_revoked(config.revoked)
    gateway = (
        ProbingGateway(config, config.probe, agent.write)
        if config.probe
        else Gateway(config, agent.write)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    try:
        gateway.start()
        # A daemon: a read of stdin cannot be interrupted.
        threading.Thread(target=_obey, args=(gateway, stdin), name="agent", daemon=True).start()
        while not gateway.wait_ended(_CHECK_S):
            pass
    finally:
        _exit_within(config.peer_lost_s + _EXIT_DEADLINE_S)
        gateway.close()
    return 0 if gateway.failure is None else 1


def _refuse(agent: AgentWriter, failure: Failure) -> int:
    _log.error("%s: %s", failure.code, failure.message)
    agent.write(Failed(failure=failure))
    return 1


def _obey(gateway: Gateway | ProbingGateway, stdin: io.FileIO) -> None:
    try:
        for command in read_commands(stdin):
            _carry_out(gateway, command)
    except IsthmusError as error:
        gateway.fail(failure_of(error))
    except Exception as error:  # noqa: BLE001 - a thread's root: reported, ends the gateway
        _log.exception("the agent's thread ended")
        gateway.fail(failure_of(error))
    gateway.stop()


def _carry_out(gateway: Gateway | ProbingGateway, command: Command) -> None:
    match command:
        case Revoke():
            gateway.take_revoked(command.list)
        case Connect():
            peers = tuple(Peer(at.site, at.gateway, at.host, at.port) for at in command.peers)
            if isinstance(gateway, Gateway):
                gateway.connect(peers, command.sites)
            else:
                gateway.connect(peers)
        case Settle() if isinstance(gateway, Gateway):
            gateway.settle(command)
        case Resume() if isinstance(gateway, Gateway):
            gateway.resume(command)
        case Cancel() if isinstance(gateway, Gateway):
            gateway.cancel(command.epoch)
        case _:
            raise LocalProtocolError("stdin: a probe has no epochs")


def _exit_within(seconds: float) -> None:
    """End the process after `seconds`, even if a library's thread is stuck."""
    timer = threading.Timer(seconds, os._exit, (70,))
    timer.daemon = True
    timer.start()
