"""Run a command that the kernel kills when its parent dies, in namespaces of its own if asked.

Usage: python -m isthmus.sites.leash PARENT_PID [--enter USER NET] -- COMMAND...

PARENT_PID `-`: on no leash; only the namespaces are entered. USER and NET are files of namespaces,
as /proc/PID/ns/net; USER may be empty.

Only the standard library, for every child of every run passes through here. The signal follows the
*thread* that started the child, so children must be started from a thread that lives as long as
its process: the main one.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWUSER = 0x10000000  # linux/sched.h
_CLONE_NEWNET = 0x40000000
USAGE = "usage: python -m isthmus.sites.leash PARENT_PID [--enter USER NET] -- COMMAND..."
CURE = "is the emulation still up, and yours? Otherwise use the relay (emulator: relay)"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies; it stays so through exec.

    Args:
        parent_pid: who the parent was when it decided to start this process.

    Raises:
        SystemExit: that parent has died already, so nobody wants this process.
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # Asked after prctl: a parent that died before it left no signal behind, only another parent.
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent process {parent_pid} has ended")


def enter(user: str, net: str) -> None:
    """Move this process into a network namespace. It must have one thread only.

    Args:
        user: file of the user namespace that owns it; empty if this process may enter without.
        net: file of the network namespace.

    Raises:
        SystemExit: the kernel refused; in one line.
    """
    # os.setns is there from Python 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    opened = []
    for path, kind in ((user, _CLONE_NEWUSER), (net, _CLONE_NEWNET)):
        # Both are opened first: from inside the user namespace, the other path may not be readable.
        if path:
            try:
                opened.append((path, kind, os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
            except OSError as error:
                raise SystemExit(f"cannot enter {path}: {error.strerror}; {CURE}") from error
    for path, kind, descriptor in opened:
        if libc.setns(descriptor, kind) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise SystemExit(f"cannot enter {path}: {reason}; {CURE}")
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Lead a process group, then become the command. Returns only when that is not possible."""
    parsed = _parse(arguments)
    if parsed is None:
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    parent_pid, namespaces, command = parsed
    if namespaces is not None:
        # Before the leash: the kernel forgets it where credentials change.
        enter(*namespaces)
    if parent_pid is not None:
        die_with_parent(parent_pid)
        os.setsid()
    try:
        os.execvp(command[0], command)  # noqa: S606 - becoming the command is the purpose
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
    return 127


def _parse(arguments: list[str]) -> tuple[int | None, tuple[str, str] | None, list[str]] | None:
    """Return parent, namespaces and command; None when the arguments are wrong."""
    match arguments:
        case [parent, "--", *command] if command:
            namespaces = None
        case [parent, "--enter", user, net, "--", *command] if command and net:
            namespaces = (user, net)
        case _:
            return None
    if parent == "-" and namespaces is not None:
        return None, namespaces, command
    return (int(parent), namespaces, command) if parent.isdecimal() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
