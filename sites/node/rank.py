"""One training process, started by torchrun: runs the user's script or the shipped trainer.

Usage: python -m isthmus.sites.node.rank PARENT_PID FOLDER (SCRIPT | -m MODULE) [ARGUMENTS...]

The process dies with its launcher, runs the script in FOLDER as `__main__`, and writes its error to
error.json, so that the first failure can be told from its victims.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from isthmus.protos.errors import (
    GradientsDifferError,
    IsthmusError,
    LocalProtocolError,
    ScriptError,
)
from isthmus.protos.failure import reason_of
from isthmus.sites.leash import die_with_parent
from isthmus.sites.node.outages import causes, is_node_fault, is_outage, is_signal_status
from isthmus.sites.node.rank_failures import (
    COLLATERAL_EXIT_CODE,
    FAULTY_EXIT_CODE,
    last_words,
    write_error_file,
    write_pid_file,
)

_LOST_SIBLING = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|remote process exited"
)
"""Messages of Gloo and NCCL when another rank of the collective has gone."""
_LOST_WORKER = re.compile(r"DataLoader worker .* exited unexpectedly")
_STDERR = Path("/proc/self/fd/2")
_NO_EXCHANGE = (GradientsDifferError, LocalProtocolError, ScriptError)
"""Our errors that do not mean a failed exchange: bad hardware, bugs, and mistakes of the script."""


_NAMED = (GradientsDifferError,)
"""Those that tell a site's failure by their own code."""


def main(arguments: list[str]) -> NoReturn:
    """Run the script and end with its exit status."""
    die_with_parent(int(arguments[0]))
    faulthandler.enable()  # a crash in native code leaves the stacks of all threads in the log
    write_pid_file(os.environ.get("TORCHELASTIC_ERROR_FILE"))
    try:
        # Only now, so that no module so far is imported from the user's folder.
        os.chdir(arguments[1])
        _run(arguments[2:])
    except SystemExit as error:
        if error.code:
            _exit(error)
    except BaseException as error:  # noqa: BLE001 - the script's root: told once, ends the process
        _fail(error)
    _leave()


def _run(command: list[str]) -> None:
    """Become `python SCRIPT ARGUMENTS...` or `python -m MODULE ARGUMENTS...`."""
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = Path(command[0]).resolve()
    # As with `python SCRIPT`, modules beside the script come first.
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *command[1:]]
    runpy.run_path(str(script), run_name="__main__")


def _exit(error: SystemExit) -> None:
    """End with the script's own exit status; a text means 1, as in Python."""
    status = error.code if isinstance(error.code, int) else 1
    if not isinstance(error.code, int):
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{error.code}\n")
    handled = next((each for each in causes(error) if not isinstance(each, SystemExit)), None)
    if handled is not None:  # the script caught an error and then exited
        _write_error(handled, status, "".join(traceback.format_exception(error)))
    else:
        _write_error(error, status, "")
    _end(status)


def _fail(error: BaseException) -> None:
    """Write error.json, print the traceback, and end."""
    text = "".join(traceback.format_exception(error))
    status = FAULTY_EXIT_CODE if is_node_fault(error) else 1
    status = COLLATERAL_EXIT_CODE if _exchange_error(error) else status
    _write_error(error, status, text)
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
    _end(status)


def _write_error(error: BaseException, status: int, text: str) -> None:
    """Write an error to error.json, with whether it is the script's fault.

    `text` is its traceback.
    """
    details = {
        "message": _message(error),
        "code": next((each.code for each in causes(error) if isinstance(each, _NAMED)), ""),
        "collateral": _exchange_error(error) is not None
        or any(_LOST_SIBLING.search(str(each)) for each in causes(error)),
        "outage": is_outage(error) or is_signal_status(status),
        "time_s": time.monotonic(),
        "wall_s": time.time(),
    }
    with contextlib.suppress(OSError):  # a full disk must not hide the exit status
        write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE"), details, text)


def _message(error: BaseException) -> str:
    """Return an error's message; for SystemExit its text, as the status is reported separately."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else ""
    # Why such a worker has exited stands above, in what it has written itself.
    is_workers = _LOST_WORKER.search(str(error)) is not None
    said = last_words(_STDERR) if is_workers and _STDERR.is_file() else ""
    return f"{reason_of(error)}: {said}" if said else reason_of(error)


def _leave() -> NoReturn:
    """End a finished script: run exit handlers, but skip the interpreter's shutdown.

    A thread of torch may free its last tensor during shutdown. It then needs the interpreter's
    lock, does not get it, and aborts the process. That is rare, and only happens on busy machines,
    but would turn success into failure.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are not daemons
    atexit._run_exitfuncs()
    _end(0)


def _end(status: int) -> NoReturn:
    """End at once.

    An orderly end may wait for threads in a collective that can no longer complete, and destroying
    Gloo during one aborts the process: the script's own status would be lost. An output that takes
    nothing more (full disk, closed stream) would lose it, too.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have replaced the stream
            stream.flush()
    os._exit(status)


def _exchange_error(error: BaseException) -> IsthmusError | type[IsthmusError] | None:
    """Return the failed exchange that is `error` or one of its causes; None: none is.

    After a C++ future an error is a RuntimeError with the type's name in its text.
    """
    for each in causes(error):
        if isinstance(each, IsthmusError):
            return None if isinstance(each, _NO_EXCHANGE) else each
    if isinstance(error, RuntimeError):
        for kind in IsthmusError.__subclasses__():
            if kind not in _NO_EXCHANGE and f"{kind.__name__}: " in str(error):
                return kind
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
