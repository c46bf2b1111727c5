"""The packet emulator as nobody: for a test that runs as root.

Usage: python -m tests.fakes.unprivileged_netns PERMISSIONS

PERMISSIONS are those of /dev/net/tun, in octal: 666 as most distributions have it, or 600. They are
changed in a mount namespace that ends with this process.
"""

import ctypes
import os
import stat
import sys
from pathlib import Path

from isthmus.orchestrator.emulator import netns

CLONE_NEWNS = 0x20000  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
PR_SET_DUMPABLE = 4  # linux/prctl.h
NOBODY = 65534


def call(name: str, *arguments: bytes | int | None) -> None:
    """Call a function of libc."""
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(libc, name)(*passed) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def main() -> int:
    """Give up root, then be the emulator."""
    permissions = int(sys.argv[1], 8)
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"none", b"/mnt", b"tmpfs", 0, None)
    os.mknod("/mnt/tun", stat.S_IFCHR, os.makedev(10, 200))
    Path("/mnt/tun").chmod(permissions)
    call("mount", b"/mnt/tun", b"/dev/net/tun", None, MS_BIND, None)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Who has changed its user is not trusted with its own /proc until it says so.
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    return netns.main()


if __name__ == "__main__":
    sys.exit(main())
