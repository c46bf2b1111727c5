"""Run a command that the kernel kills when its parent dies.

Usage: python -m sites.leash PARENT_PID -- COMMAND...

Only the standard library, for every child of every run passes through here. The signal follows the
*thread* that started the child, so children must be started from a thread that lives as long as
its process: the main one.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
USAGE = "usage: python -m sites.leash PARENT_PID -- COMMAND..."


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


def main(arguments: list[str]) -> int:
    """Lead a process group, then become the command. Returns only when that is not possible."""
    if len(arguments) < 3 or arguments[1] != "--" or not arguments[0].isdecimal():
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    die_with_parent(int(arguments[0]))
    os.setsid()
    command = arguments[2:]
    try:
        os.execvp(command[0], command)  # noqa: S606 - becoming the command is the purpose
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
