"""Run a Slurm with several nodes on this machine, for tests and for trying things.

Usage: python -m tests.tools.slurm_here FOLDER [PARTITION=NODES ...]    default: eu=2 us=2

It takes Debian's packages slurm-wlm and munge; none of their services need to run. All files lie
in FOLDER, which is made and removed: configuration, state, logs, and a munge key of its own. It
belongs to who starts it, and takes jobs of that user alone. It prints what to put into the
environment of another terminal:

    export SLURM_CONF=FOLDER/slurm.conf

Ctrl-C, or the end of its stdin, ends the jobs, the daemons and all that they have started.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.fakes.waiting import wait_for
from tests.tools.daemons import Daemons, free_ports, hold

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scancel", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Where Debian has the daemons."""
USER = pwd.getpwuid(os.getuid()).pw_name
LOOK_S = 0.2
JOBS_END_S = 40.0
CONFIG = """\
ClusterName=here
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is requeued may begin once its credential has expired, by default after two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
MpiDefault=none
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
SlurmctldPort={port}
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
"""


def main(arguments: list[str]) -> int:
    """Hold one; return the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if missing := missing_programs():
        print(missing, file=sys.stderr)
        return 1
    folder = Path(arguments[0]).absolute()
    pairs = [argument.partition("=") for argument in arguments[1:] or ["eu=2", "us=2"]]
    folder.mkdir(parents=True)
    try:
        with Daemons(folder, _environment(folder)) as daemons:
            start(daemons, folder, {name: int(num_nodes) for name, _, num_nodes in pairs})
            try:
                hold(f"export SLURM_CONF={folder / 'slurm.conf'}")
            finally:
                _end_jobs(folder)
        # Steps outlive a slurmd that was killed, and tasks their step.
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not _kill_left_behind(folder), "the end", 5.0, LOOK_S)
    finally:
        shutil.rmtree(folder)
    return 0


def missing_programs() -> str:
    """Return what is not here and how to have it; empty: nothing is missing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"no Slurm here: {', '.join(missing)}; apt-get install slurm-wlm munge" * bool(missing)


def start(daemons: Daemons, folder: Path, partitions: dict[str, int]) -> None:
    """Start a munged, a controller and the nodes of all partitions; return once they are idle."""
    (folder / "state").mkdir(mode=0o700)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    port, *ports = free_ports(1 + sum(partitions.values()))
    lines = [CONFIG.format(user=USER, folder=folder, port=port)]
    names: list[str] = []
    for partition, num_nodes in partitions.items():
        is_default = "NO" if names else "YES"
        own = [f"{partition}{index}" for index in range(1, num_nodes + 1)]
        names += own
        lines += [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 "
            f"Port={ports.pop()} CPUs=8 RealMemory=1000 State=UNKNOWN"
            for name in own
        ]
        lines.append(
            f"PartitionName={partition} Nodes={','.join(own)} Default={is_default} "
            "MaxTime=INFINITE State=UP"
        )
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    munge = folder / "munge"
    daemons.start(
        *("munged", "munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--socket={munge}.socket", f"--pid-file={munge}.pid", f"--seed-file={munge}.seed"),
        f"--log-file={munge}.log",
    )
    wait_for(Path(f"{munge}.socket").exists, "munged", look_s=LOOK_S)
    daemons.start("slurmctld", "slurmctld", "-D")
    for name in names:
        daemons.start(name, "slurmd", "-D", "-N", name)

    def are_idle() -> bool:
        return _said(folder, "sinfo", "-h", "-o", "%T").split() == ["idle"]

    wait_for(are_idle, "the nodes", look_s=LOOK_S)


def _end_jobs(folder: Path) -> None:
    _said(folder, "scancel", "--user", USER)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not _said(folder, "squeue", "-h").strip(), "", JOBS_END_S, LOOK_S)


def _kill_left_behind(folder: Path) -> list[int]:
    """Kill what no daemon knows of any more, and return it: Slurm's own, and jobs' tasks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, environ = (process / "comm").read_text(), (process / "environ").read_bytes()
        except OSError:
            continue
        is_its = name.startswith(("slurm", "srun", "munged")) or b"\0SLURM_JOB_ID=" in environ
        is_here = f"SLURM_CONF={folder / 'slurm.conf'}".encode() in environ
        if is_its and is_here and int(process.name) != os.getpid():
            found.append(int(process.name))
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[-1], signal.SIGKILL)
    return found


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}


def _said(folder: Path, *words: str) -> str:
    """Return what a client's command prints; nothing where it fails."""
    env = {**os.environ, **_environment(folder)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
