"""Machines and jobs that are set up badly: each is named, with its cure, and nothing else is.

A set-up is real wherever this machine can be made so: files, limits, ports, disks, TCP's settings
and the network of a namespace. Clocks, accelerators and other builds are told instead.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.orchestrator.doctor import examination
from isthmus.orchestrator.doctor.examination import Examined, all_findings, quick_findings
from isthmus.orchestrator.doctor.examiner import Examiner, NoAnswerError
from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.orchestrator.doctor.job_checks import job_findings
from isthmus.orchestrator.doctor.machine_checks import (
    Machine,
    lane_findings,
    machine_findings,
    torch_findings,
)
from isthmus.orchestrator.doctor.path_checks import (
    Tried,
    clock_findings,
    connection_findings,
    route_findings,
    tcp_findings,
)
from isthmus.sites.facts import files
from isthmus.sites.facts import machine as machine_facts
from isthmus.sites.facts.machine import collect
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.machine_facts import Accelerators, Facts, Folder, NumaDevice, Wanted
from isthmus.topology.spec.world import Launcher, PortRange, Security, Topology
from tests.fakes.machines import examiner_in, facts_in, good_facts, topology, two_networks
from tests.fakes.sshd import sshd

NOBODY = 65534
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
UP = "ip link set lo up"


def job(*lines: str) -> Job:
    return load_job("\n".join(("version: 1", "name: j", "topology: t.yaml", *lines)), "job.yaml")


def examined(home: Path, text: Job | None = None, *overrides: str) -> Examined:
    return Examined(
        topology=topology(*overrides),
        job=text,
        job_path=None if text is None else home / "job.yaml",
        home=home,
    )


def machine(facts: Facts, described: Topology | None = None, name: str | None = None) -> Machine:
    return Machine(name=name, sites=(described or topology()).sites, facts=facts)


def only(found: Iterable[Finding], kind: str, severity: Severity, cure: str) -> Finding:
    """Return the one finding; it is of that kind, and its cure has these words."""
    findings = list(found)
    assert [(each.kind, each.severity) for each in findings] == [(kind, severity)], findings
    assert cure in findings[0].cure
    assert findings[0].found
    assert findings[0].why
    return findings[0]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user without rights, where this is root."""
    if os.geteuid() != 0:
        yield
        return
    collect(Wanted(addresses=("127.0.0.1",)))  # imports what nobody may not read
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


CARDS = tuple(NumaDevice(kind="card", name=str(index), node=index // 2) for index in range(3))


@pytest.mark.parametrize(
    ("devices", "said", "cure"),
    [
        (CARDS[:2], "cards 0, 1 are on node 0", "under `numactl --cpunodebind=N`"),
        (
            (NumaDevice(kind="interface", name="ens5", node=1), *CARDS),
            "ens5 is on node 1; cards 0, 1 are on node 0; card 2 is on node 1",
            "`wan: {interfaces: […]}` of site a",
        ),
    ],
)
def test_numa_nodes_are_told(devices: tuple[NumaDevice, ...], said: str, cure: str) -> None:
    facts = dataclasses.replace(good_facts(), numa=devices)
    described = topology()
    found = only(machine_findings(machine(facts, described), described), "numa-nodes", NOTE, cure)
    assert found.found.endswith(said)


def test_nothing_is_found_where_all_is_well() -> None:
    good = machine(good_facts())
    assert machine_findings(good, topology()) == []
    assert tcp_findings({"a": good, "b": good}, topology(), None) == []
    assert not list(route_findings(good, topology()))


def test_the_number_of_gateways_is_told_where_several_are_asked_for() -> None:
    fast = topology("links.0.bandwidth=100Gbit/s", "sites.0.accelerators_per_node=8")
    one = dataclasses.replace(machine(good_facts(), fast), sites=fast.sites[:1])
    assert not list(lane_findings(one, fast))  # an older build does not know its cores

    def with_cores(count: int) -> Machine:
        return dataclasses.replace(one, facts=dataclasses.replace(good_facts(), usable_cores=count))

    found = only(lane_findings(with_cores(16), fast), "gateways-chosen", NOTE, "gateways_per_node")
    assert found.site == "a"
    assert found.found == (
        "gateways a node: 4; links ask for 9, ranks allow 8, cores allow 4; limited by cores"
    )
    assert found.why == "one gateway carries about 12Gbit/s each way"
    [few] = lane_findings(with_cores(2), fast)
    assert few.found.startswith("gateways a node: 1; ")
    assert not list(lane_findings(with_cores(16), topology()))  # its links ask for one


# The files that a job names.


def files_of(text: Job, folder: Path) -> list[Finding]:
    wanted = examined(folder, text).wanted(topology().sites)
    with as_nobody():
        facts = collect(dataclasses.replace(wanted, folders=()))
    return job_findings(facts, text)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody may look into, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_1_a_missing_entrypoint(open_folder: Path) -> None:
    found = files_of(job("entrypoint: train.py"), open_folder)
    only(found, "script-unreadable", ERROR, f"ls -l {open_folder}/train.py")


def test_2_an_entrypoint_that_may_not_be_read(open_folder: Path) -> None:
    (open_folder / "train.py").write_text("import isthmus\nisthmus.join()\n")
    (open_folder / "train.py").chmod(0)
    found = files_of(job("entrypoint: train.py"), open_folder)
    told = only(found, "script-unreadable", ERROR, "setfacl -m u:")
    assert "Permission denied" in told.found


def test_3_an_entrypoint_that_is_not_python(open_folder: Path) -> None:
    (open_folder / "train.py").write_text("import isthmus\nisthmus.join(\n")
    found = files_of(job("entrypoint: train.py"), open_folder)
    told = only(found, "script-syntax", ERROR, "python -m py_compile")
    assert told.line is not None
    assert told.line[1] == 2


JOINS = "import isthmus\nsite = isthmus.join()\nsite.attach(model, optimizer)\n"


def test_a_working_folder_that_is_not_there(open_folder: Path) -> None:
    (open_folder / "train.py").write_text(JOINS)
    assert files_of(job("entrypoint: train.py"), open_folder) == []
    (open_folder / "file").touch()
    for folder, why in (("nowhere", "No such file"), ("file", "Not a directory")):
        found = files_of(job(f"entrypoint: train.py\nworking_folder: {folder}"), open_folder)
        told = only(found, "working-folder-missing", ERROR, f"`working_folder: {folder}`")
        assert why in told.found
        assert told.path == ("working_folder",)


def test_files_are_looked_for_where_the_site_has_them(open_folder: Path) -> None:
    here, there = open_folder / "here", open_folder / "there"
    here.mkdir(mode=0o755)
    (here / "train.py").write_text(JOINS)
    moved = dataclasses.replace(topology().sites[0], job_folder=str(there))
    asked = examined(here, job("entrypoint: train.py")).wanted([moved])
    assert (asked.script, asked.working_folder) == (str(there / "train.py"), str(there))
    found = job_findings(collect(asked), job("entrypoint: train.py"), "a")
    assert {each.kind for each in found} == {"script-unreadable", "working-folder-missing"}
    assert "`job_folder`" in found[1].cure


def test_4_an_entrypoint_that_never_joins(open_folder: Path) -> None:
    (open_folder / "train.py").write_text("print('alone')\n")
    found = files_of(job("entrypoint: train.py"), open_folder)
    only(found, "script-never-joins", WARNING, "site = isthmus.join(); site.attach(")


def test_an_entrypoint_that_never_attaches(open_folder: Path) -> None:
    (open_folder / "train.py").write_text("import isthmus\nisthmus.join()\n")
    found = files_of(job("entrypoint: train.py"), open_folder)
    only(found, "script-never-attaches", WARNING, "site.attach(model, optimizer)")


@pytest.mark.parametrize("kind", ["diloco", "streaming", "local_sgd"])
@pytest.mark.parametrize(
    "use",
    [
        "model.eval()",
        "torch.save(model.state_dict(), 'model')",
        "model.module.save_pretrained('folder')",
        "mean = torch.optim.swa_utils.AveragedModel(model)",
        "with torch.inference_mode(): model(inputs)",
    ],
)
def test_an_entrypoint_that_uses_what_one_site_has(open_folder: Path, kind: str, use: str) -> None:
    (open_folder / "train.py").write_text(f"{JOINS}{use}\n")
    regime = f"entrypoint: train.py\nregime: {kind}"
    told = only(files_of(job(regime), open_folder), "script-uses-own", WARNING, "global_parameters")
    assert kind in told.why
    assert files_of(job("entrypoint: train.py\nregime: delayed"), open_folder) == []
    (open_folder / "helper.py").write_text("def all_sites(site): return site.global_parameters()\n")
    (open_folder / "train.py").write_text(f"import helper\n{JOINS}{use}\n")
    assert files_of(job(regime), open_folder) == []


def test_5_data_that_is_not_there(open_folder: Path) -> None:
    found = files_of(job("trainer: {data: {files: ['*.text']}}"), open_folder)
    only(found, "data-missing", ERROR, f"ls {open_folder}/*.text")


def test_6_data_that_may_not_be_read(open_folder: Path) -> None:
    (open_folder / "one.text").write_text("words")
    (open_folder / "two.text").touch(0)
    found = files_of(job("trainer: {data: {files: ['*.text']}}"), open_folder)
    told = only(found, "data-unreadable", ERROR, "setfacl -R -m u:")
    assert "two.text: Permission denied" in told.found


def test_data_of_many_files_is_not_looked_at_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (tmp_path / f"{number}.text").touch()
    monkeypatch.setattr(files, "_OPENED_MAX", 3)
    assert files.match(f"{tmp_path}/*.text").num_files == 3
    monkeypatch.setattr(files, "_WITHIN_S", -1.0)
    unknown = files.match(f"{tmp_path}/*.text")
    assert (unknown.num_files, unknown.is_complete) == (0, False)
    facts = dataclasses.replace(good_facts(), globs=(unknown,))
    assert job_findings(facts, job("trainer: {data: {files: ['*.text']}}")) == []


# Folders and disks.


def test_7_a_home_that_may_not_be_written(open_folder: Path) -> None:
    with as_nobody():
        facts = collect(Wanted(folders=(f"{open_folder}/home/runs",)))
    facts = dataclasses.replace(good_facts(), folders=facts.folders)
    found = machine_findings(machine(facts), topology())
    only(found, "folder-not-writable", ERROR, "sudo chown")


def test_8_a_full_disk() -> None:
    facts = facts_in(
        "mount -t tmpfs -o size=1m none /mnt; head -c 1040000 /dev/zero > /mnt/full",
        Wanted(folders=("/mnt/runs",)),
    )
    facts = dataclasses.replace(good_facts(), folders=facts.folders)
    only(machine_findings(machine(facts), topology()), "disk-full", ERROR, "df -h /mnt")


def test_a_disk_that_metrics_would_fill() -> None:
    facts = dataclasses.replace(good_facts(), folders=(Folder(path="/c/runs", free_bytes=1 << 28),))
    only(machine_findings(machine(facts), topology()), "little-disk", WARNING, "df -h /c")


def test_9_no_more_files() -> None:
    facts = facts_in(
        "mount -t tmpfs -o size=100m,nr_inodes=50 none /mnt", Wanted(folders=("/mnt/runs",))
    )
    facts = dataclasses.replace(good_facts(), folders=facts.folders)
    only(machine_findings(machine(facts), topology()), "few-free-files", ERROR, "df -i /mnt")


def test_10_checkpoints_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    asked = examined(tmp_path, job("checkpoint: {to: checkpoints/here}"))
    found = [each for each in quick_findings(asked) if each.kind != "little-disk"]
    only(found, "checkpoints-not-writable", ERROR, "`checkpoint: {to: …}`")


def test_10_checkpoints_at_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    asked = examined(tmp_path, job("checkpoint: {to: checkpoints}"))
    found = [each for each in quick_findings(asked) if each.kind != "little-disk"]
    told = only(found, "checkpoints-not-writable", ERROR, "name a folder in `checkpoint: {to: …}`")
    assert told.found == f"{tmp_path}/checkpoints is a file, and no folder"
    assert "mkdir" not in told.cure


def test_10_checkpoints_where_nothing_can_be_made_and_no_space_is_told(tmp_path: Path) -> None:
    asked = examined(tmp_path, job("checkpoint: {to: /proc/x}"))
    found = [each for each in quick_findings(asked) if each.kind != "little-disk"]
    told = only(found, "checkpoints-not-writable", ERROR, "`checkpoint: {to: …}`")
    assert "nothing can be written in /proc/x" in told.found


def test_10_a_full_disk_of_checkpoints_does_not_fail_the_run() -> None:
    full = Folder(path="/c", error="/c: No space left on device", free_bytes=0)
    facts = dataclasses.replace(good_facts(), folders=(full,))
    told = only(machine_findings(machine(facts), topology(), "/c"), "disk-full", ERROR, "df -h /")
    assert "the run fails" not in told.why


@pytest.mark.parametrize("url", ["nothing://bucket/runs", "nothing:///runs"])
def test_10_checkpoints_at_a_url_that_cannot_be_opened(tmp_path: Path, url: str) -> None:
    asked = examined(tmp_path, job(f"checkpoint: {{to: '{url}'}}"))
    found = [each for each in quick_findings(asked) if each.kind != "little-disk"]
    told = only(found, "checkpoints-not-openable", ERROR, "available_protocols")
    assert "Protocol not known: nothing" in told.found


def test_11_little_shared_memory() -> None:
    facts = facts_in("mount -t tmpfs -o size=1m none /dev/shm")
    facts = dataclasses.replace(good_facts(), shared_memory_bytes=facts.shared_memory_bytes)
    found = machine_findings(machine(facts), topology())
    only(found, "little-shared-memory", WARNING, "sudo mount -o remount,size=1G /dev/shm")
    facts = dataclasses.replace(facts, accelerators=Accelerators(names=("gpu",) * 2, nccl=True))
    found = machine_findings(machine(facts), topology())
    only(found, "little-shared-memory", ERROR, "--shm-size=")


# Accelerators.

H100 = "NVIDIA H100 80GB HBM3"
H100S = ("sites.0.accelerator=h100-sxm", "sites.1.accelerator=h100-sxm")


@pytest.mark.parametrize(
    ("gpus", "seen", "kind", "severity"),
    [
        ((), None, "accelerators-missing", ERROR),
        ((H100,), None, "few-accelerators", ERROR),
        (("NVIDIA A100-SXM4-80GB",) * 2, None, "accelerators-differ", WARNING),
        ((H100,) * 2, ("NVIDIA A100-SXM4-80GB",) * 2, "accelerators-differ", WARNING),
    ],
)
def test_accelerators_that_are_not_there_or_others(
    gpus: tuple[str, ...], seen: tuple[str, ...] | None, kind: str, severity: Severity
) -> None:
    world = topology(*H100S)
    torch = None if seen is None else Accelerators(names=seen, nccl=True)
    facts = dataclasses.replace(good_facts(), gpus=gpus, accelerators=torch)
    site = Machine(name="a", sites=(world.site("a"),), facts=facts)
    told = only(machine_findings(site, world), kind, severity, "`accelerator: cpu`")
    assert "the topology says 2 h100-sxm a node of site a" in told.found
    emulated = topology(*H100S, "emulate=true")
    other = Machine(name="a", sites=(emulated.site("a"),), facts=facts)
    assert machine_findings(other, emulated) == []
    modelled = job("trainer: {compute: modelled}")
    assert machine_findings(site, world, job=modelled) == []
    lowered = WARNING if kind == "accelerators-missing" else severity
    cpus = job("allow_cpu: true")
    only(machine_findings(site, world, job=cpus), kind, lowered, "`accelerator: cpu`")


def test_accelerators_that_torch_does_not_see() -> None:
    world = topology(*H100S)
    facts = dataclasses.replace(good_facts(), gpus=(H100,) * 2, accelerators=Accelerators())
    found = machine_findings(Machine(name="a", sites=(world.site("a"),), facts=facts), world)
    assert [(each.kind, each.severity) for each in found] == [
        ("accelerators-unseen", WARNING),
        ("accelerators-missing", ERROR),
    ]


@pytest.mark.parametrize("gpus", [None, (H100,) * 2, (H100,) * 8])
def test_accelerators_that_are_as_the_topology_says_or_unknown(
    gpus: tuple[str, ...] | None,
) -> None:
    world = topology(*H100S)
    assert (
        machine_findings(machine(dataclasses.replace(good_facts(), gpus=gpus), world), world) == []
    )


def test_what_the_kernel_tells_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "nvidia" / "version"
    monkeypatch.setattr(machine_facts, "_NVIDIA", version)
    monkeypatch.setattr(machine_facts, "_GPU_SIGNS", (version, tmp_path / "kfd"))
    assert collect(Wanted()).gpus == ()
    (tmp_path / "kfd").touch()
    assert collect(Wanted()).gpus is None
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "nvidia" / "gpus" / bus).mkdir(parents=True)
        told = f"Model: \t\t {H100}\nIRQ:   \t\t 17\n"
        (tmp_path / "nvidia" / "gpus" / bus / "information").write_text(told)
    assert collect(Wanted()).gpus == (H100, H100)


def test_launch_hears_of_accelerators_that_are_missing(open_folder: Path) -> None:
    if collect(Wanted()).gpus != ():
        pytest.skip("this machine has a GPU")
    found = quick_findings(examined(open_folder, None, *H100S))
    assert {(each.kind, each.site, each.severity) for each in found} == {
        ("accelerators-missing", "a", ERROR),
        ("accelerators-missing", "b", ERROR),
    }
    assert quick_findings(examined(open_folder, None)) == []


# Limits.


@pytest.mark.parametrize(("most", "severity"), [(100, ERROR), (200, WARNING)])
def test_12_few_open_files(most: int, severity: Severity) -> None:
    facts = facts_in(f"ulimit -n {most}")
    facts = dataclasses.replace(good_facts(), limits=facts.limits)
    found = machine_findings(machine(facts), topology())
    only(found, "few-open-files", severity, "ulimit -n 65536")


def test_13_few_processes() -> None:
    limits = dataclasses.replace(good_facts().limits, processes=100)
    facts = dataclasses.replace(good_facts(), limits=limits)
    only(machine_findings(machine(facts), topology()), "few-processes", WARNING, "ulimit -u 4096")


def test_14_little_locked_memory_beside_infiniband() -> None:
    limits = dataclasses.replace(good_facts().limits, locked_bytes=64 << 10)
    facts = dataclasses.replace(good_facts(), limits=limits, has_infiniband=True)
    found = machine_findings(machine(facts), topology())
    only(found, "little-locked-memory", WARNING, "ulimit -l unlimited")


# Addresses and ports.


def test_15_an_address_that_nothing_can_listen_on() -> None:
    facts = facts_in(UP, Wanted(addresses=("10.9.9.9", "127.0.0.2")), network=True)
    assert set(facts.refused or {}) == {"10.9.9.9"}
    site = dataclasses.replace(topology().site("a"), address="10.9.9.9")
    facts = dataclasses.replace(good_facts(), refused=facts.refused)
    here = Machine(name="a", sites=(site,), facts=facts)
    told = only(machine_findings(here, topology()), "address-refused", ERROR, "ip -brief address")
    assert "no interface of this machine has this address" in told.found


def test_16_a_port_that_something_else_listens_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))  # never answers, as a process that is stopped
            found = all_findings(
                examined(tmp_path, None, f"coordinator.bind=127.0.0.1:{port}", "emulate=true")
            )
    told = [each for each in found if each.kind == "coordinator-address-refused"]
    only(told, "coordinator-address-refused", ERROR, f"ss -ltnp 'sport = :{port}'")


def test_17_a_path_that_a_firewall_closes() -> None:
    # Rules of the kernel's own, so that no firewall has to be installed.
    closed = (
        f"{UP}; ip rule add pref 10 table local; ip rule del pref 0; "
        "ip rule add pref 5 from 127.0.0.2 to 127.0.0.3 prohibit"
    )
    with examiner_in(closed) as examiner:
        port = examiner.listen("127.0.0.3", None, 20.0)
        assert isinstance(port, int)
        error = examiner.reach("127.0.0.2", "127.0.0.3", port, 1.0)
    assert error is not None
    tried = Tried(
        source="a",
        target="b",
        source_address="127.0.0.2",
        target_address="127.0.0.3",
        port=port,
        error=error,
    )
    told = only(connection_findings(tried), "unreachable", ERROR, "iptables -I INPUT -p tcp")
    assert told.found.startswith("from a (127.0.0.2) to b (127.0.0.3), port ")


def test_a_path_that_is_open() -> None:
    with examiner_in(UP) as examiner:
        port = examiner.listen("127.0.0.3", None, 20.0)
        assert isinstance(port, int)
        assert examiner.reach("127.0.0.2", "127.0.0.3", port, 3.0) is None
        assert examiner.reach("127.0.0.2", "127.0.0.3", 1, 3.0) == "Connection refused"


def test_each_port_that_gateways_take_of_a_range_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "REACH_S", 2.0)
    asked = examined(tmp_path)
    first, second = (
        dataclasses.replace(site, address=f"10.9.0.{number}")
        for number, site in enumerate(topology().sites, start=1)
    )
    ports = PortRange(first=29500, last=29504)
    sites = (first, dataclasses.replace(second, gateways_per_node=2, ports=ports))
    asked = dataclasses.replace(asked, topology=dataclasses.replace(asked.topology, sites=sites))
    with two_networks() as (one, other):
        reached = {"a": [*one, sys.executable], "b": [*other, sys.executable]}

        def unreachable() -> list[Finding]:
            found = all_findings(asked, None, reached)
            return [each for each in found if each.kind == "unreachable"]

        assert unreachable() == []
        shut = "ip rule add pref 5 to 10.9.0.2 ipproto tcp dport"
        subprocess.run([*one, *f"{shut} 29502 prohibit".split()], check=True)
        assert unreachable() == []  # two gateways take two ports
        subprocess.run([*one, *f"{shut} 29501 prohibit".split()], check=True)
        [told] = unreachable()
        assert told.found.startswith("from a (10.9.0.1) to b (10.9.0.2), port 29501: ")
        assert told.why == "its gateways dial the other's, each on a port of 29500-29504"


def test_two_machines_are_examined_and_the_ways_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "REACH_S", 0.4)
    sites = tuple(
        dataclasses.replace(site, address=f"10.9.0.{number}")
        for number, site in enumerate(topology().sites, start=1)
    )
    asked = examined(tmp_path)
    asked = dataclasses.replace(asked, topology=dataclasses.replace(asked.topology, sites=sites))
    with two_networks() as (one, other):
        reached = {"a": [*one, sys.executable], "b": [*other, sys.executable]}
        well = all_findings(asked, None, reached)
        assert {each.kind for each in well if each.severity is ERROR} == set()
        assert {each.site for each in well} <= {"a", "b", None}
        subprocess.run([*other, *["ip", "route", "add", "prohibit", "10.9.0.1/32"]], check=True)
        closed = [each for each in all_findings(asked, None, reached) if each.severity is ERROR]
        told = [(each.kind, each.site) for each in closed]
        assert told == [("no-route", "b"), ("unreachable", "a"), ("unreachable", "b")]
        assert "no answer within 0.4 s" in closed[1].found
    gone = all_findings(asked, None, reached)
    assert [(each.kind, each.site) for each in gone if each.severity is ERROR] == [
        ("no-answer", "a"),
        ("no-answer", "b"),
    ]


@pytest.mark.slow
def test_every_machine_of_a_site_is_examined_by_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three is not who it says, the third has another address."""
    monkeypatch.setattr(examination, "REACH_S", 0.4)
    with sshd(tmp_path / "sshd") as server:

        def errors(*hosts: str, options: list[str]) -> list[tuple[str, str | None]]:
            launcher = Launcher(kind="ssh", python=sys.executable, options=tuple(options))
            a, b = topology().sites
            a = dataclasses.replace(
                a, nodes=len(hosts), hosts=hosts, address=hosts[0], launcher=launcher
            )
            asked = examined(tmp_path)
            described = dataclasses.replace(asked.topology, sites=(a, b))
            found = all_findings(dataclasses.replace(asked, topology=described))
            return [(each.kind, each.site) for each in found if each.severity is ERROR]

        inner = server.inner()
        assert errors("127.0.0.2", "127.0.0.12", options=inner) == []
        wrong = errors("127.0.0.2", "127.0.0.12", "10.9.9.9", options=inner)
        assert ("address-refused", "a (10.9.9.9)") in wrong
        assert {site for _, site in wrong} <= {"a (10.9.9.9)", "a"}
        unknown = [each.replace(f"{server.folder}/known", "/dev/null") for each in inner]
        told = errors("127.0.0.2", "127.0.0.12", options=unknown)
        assert told == [("no-answer", "a (127.0.0.12)")]


def test_a_site_that_is_elsewhere(tmp_path: Path) -> None:
    sites = tuple(dataclasses.replace(site, address="10.9.9.9") for site in topology().sites)
    asked = examined(tmp_path)
    asked = dataclasses.replace(asked, topology=dataclasses.replace(asked.topology, sites=sites))
    found = [each for each in all_findings(asked) if each.kind == "not-examined"]
    assert [(each.site, each.severity) for each in found] == [("a", NOTE), ("b", NOTE)]
    assert "isthmus doctor TOPOLOGY --site a" in found[0].cure


def test_18_large_packets_that_are_lost() -> None:
    """A port that takes connections, and of what is sent to it gives nothing back."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Examiner() as examiner:
        port = silent.getsockname()[1]
        error = examiner.reach("127.0.0.1", "127.0.0.1", port, 0.3)
    tried = Tried(
        source="a",
        target="b",
        source_address="127.0.0.1",
        target_address="127.0.0.1",
        port=port,
        error=error,
    )
    told = only(connection_findings(tried), "large-packets-lost", ERROR, "tcp_mtu_probing=1")
    assert "only 0 came back" in told.found


def test_19_no_route() -> None:
    facts = facts_in(UP, Wanted(peers=("10.9.9.9",)), network=True)
    facts = dataclasses.replace(good_facts(), unrouted=facts.unrouted)
    only(route_findings(machine(facts), topology()), "no-route", ERROR, "ip route get 10.9.9.9")


def test_20_a_small_mtu() -> None:
    facts = facts_in(f"{UP}; ip link set lo mtu 1000", Wanted(peers=("127.0.0.3",)), network=True)
    facts = dataclasses.replace(good_facts(), mtus_bytes=facts.mtus_bytes)
    found = route_findings(machine(facts), topology())
    told = only(found, "small-mtu", WARNING, "sudo ip link set dev DEVICE mtu 1500")
    assert "of site b have 1000 bytes" in told.found


# TCP's settings.


def tcp_in(shell: str) -> Facts:
    return facts_in(f"{UP}; {shell}", network=True)


def test_21_small_buffers() -> None:
    facts = tcp_in(
        "echo '4096 16384 262144' > /proc/sys/net/ipv4/tcp_wmem; "
        "echo '4096 131072 262144' > /proc/sys/net/ipv4/tcp_rmem"
    )
    tcp = dataclasses.replace(
        good_facts().tcp,
        send_max_bytes=facts.tcp.send_max_bytes,
        receive_max_bytes=facts.tcp.receive_max_bytes,
    )
    small = machine(dataclasses.replace(good_facts(), tcp=tcp))
    send, receive = tcp_findings({"a": small, "b": small}, topology(), None)
    only([send], "small-send-buffer", WARNING, "sysctl -w net.ipv4.tcp_wmem='4096 16384 67108864'")
    only([receive], "small-receive-buffer", WARNING, "net.ipv4.tcp_rmem='4096 131072 134217728'")
    assert "64 connections carry 13% of it" in send.why


def test_22_slow_starts_after_pauses() -> None:
    facts = tcp_in("echo 1 > /proc/sys/net/ipv4/tcp_slow_start_after_idle")
    tcp = dataclasses.replace(
        good_facts().tcp, slow_start_after_idle=facts.tcp.slow_start_after_idle
    )
    slow = machine(dataclasses.replace(good_facts(), tcp=tcp))
    assert tcp_findings({"a": slow}, topology(), None) == []  # BBR makes no slow starts
    found = tcp_findings({"a": slow}, topology("links.0.congestion=cubic"), None)
    cure = "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
    only(found, "slow-start-after-idle", WARNING, cure)


def test_23_no_bbr_where_packets_are_lost() -> None:
    tcp = dataclasses.replace(good_facts().tcp, congestion_allowed=("reno", "cubic"))
    without = machine(dataclasses.replace(good_facts(), tcp=tcp))
    found = tcp_findings({"a": without}, topology(), None)
    only(found, "bbr-unavailable", WARNING, "sudo modprobe tcp_bbr && sudo sysctl -w")
    assert tcp_findings({"a": without}, topology("links.0.loss=0%"), None) == []
    asked = topology("links.0.loss=0%", "links.0.congestion=bbr")
    only(tcp_findings({"a": without}, asked, None), "bbr-unavailable", WARNING, "modprobe")


def test_tls_is_not_the_kernels_work() -> None:
    lacks = "the kernel (CONFIG_TLS, module tls)"
    tcp = dataclasses.replace(good_facts().tcp, lacks_kernel_tls=lacks)
    without = machine(dataclasses.replace(good_facts(), tcp=tcp))
    encrypted = dataclasses.replace(topology(), security=Security(mode="mtls"))
    found = only(
        tcp_findings({"a": without}, encrypted, None), "no-kernel-tls", NOTE, "modprobe tls"
    )
    assert lacks in found.found
    assert tcp_findings({"a": without}, topology(), None) == []  # nothing is encrypted
    assert tcp_findings({"a": machine(good_facts())}, encrypted, None) == []


# Clocks, versions and accelerators.


def test_24_a_wrong_clock() -> None:
    far = clock_findings("a", -12.0, 0.2, has_certificates=True)
    told = only(far, "clock-off", WARNING, "sudo timedatectl set-ntp true")
    assert "11.8s behind" in told.found
    wrong = clock_findings("a", 400.0, 0.2, has_certificates=True)
    only(wrong, "clock-off", ERROR, "sudo timedatectl set-ntp true")
    assert not list(clock_findings("a", 0.9, 0.2, has_certificates=True))
    with Examiner() as examiner:
        ahead_s, uncertain_s = examiner.clock_ahead_s(20.0)
    assert abs(ahead_s) <= uncertain_s + 0.01


def test_25_builds_that_do_not_understand_each_other() -> None:
    old = dataclasses.replace(good_facts(), build="0.0.1", control_protocols=(0, 0))
    found = machine_findings(machine(old, name="a"), topology())
    only(found, "protocol-unknown", ERROR, "pip install isthmus==")
    other = dataclasses.replace(good_facts(), build="0.0.1")
    found = machine_findings(machine(other, name="a"), topology())
    only(found, "version-differs", WARNING, "pip install isthmus==")
    apart = dataclasses.replace(good_facts(), exchange_protocols=(90, 91))
    differ = torch_findings([machine(good_facts()), machine(apart, name="b")])
    only(differ, "protocol-unknown", ERROR, "pip install isthmus==")


def test_26_no_torch_and_another_one() -> None:
    without = dataclasses.replace(good_facts(), torch=None)
    found = machine_findings(machine(without), topology())
    only(found, "torch-missing", ERROR, "pip install 'isthmus[train]'")
    old = dataclasses.replace(good_facts(), torch="2.5.0", lacks="torch is 2.5.0, older than 2.9")
    found = machine_findings(machine(old), topology())
    only(found, "cannot-train", ERROR, "pip install 'isthmus[train]'")
    assert found[0].found == "torch is 2.5.0, older than 2.9"
    plain = dataclasses.replace(good_facts(), plain="no C compiler works")
    found = machine_findings(machine(plain, name="a"), topology())
    only(found, "plain-python", WARNING, "install gcc")
    other = dataclasses.replace(good_facts(), torch="2.5.0")
    differ = torch_findings([machine(good_facts()), machine(other, name="b")])
    only(differ, "torch-differs", WARNING, "pip install torch==2.9.0")


def test_27_accelerators() -> None:
    def found(seen: Accelerators) -> list[Finding]:
        facts = dataclasses.replace(good_facts(), accelerators=seen)
        return machine_findings(machine(facts), topology())

    few = Accelerators(names=("gpu",), nccl=True)
    only(found(few), "few-accelerators", ERROR, "`accelerators_per_node: 1`")
    alone = Accelerators(names=("gpu", "gpu"), nccl=False)
    only(found(alone), "nccl-missing", ERROR, "pip install --force-reinstall")
    only(found(Accelerators()), "accelerators-unseen", WARNING, "nvidia-smi")


def test_28_no_network_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examination, "netns_problem", lambda: "/dev/net/tun: not there")
    for emulator, severity in (("netns", ERROR), ("auto", NOTE)):
        found = all_findings(examined(tmp_path, None, "emulate=true", f"emulator={emulator}"))
        told = [each for each in found if each.kind == "no-network-namespaces"]
        only(told, "no-network-namespaces", severity, "--emulator relay")


@pytest.mark.parametrize("harm", ["readable", "link"])
def test_29_a_secret_that_others_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    token = tmp_path / "token"
    if harm == "link":
        token.symlink_to(tmp_path / "elsewhere")
    else:
        token.write_text("secret")
        token.chmod(0o644)
    monkeypatch.setenv("ISTHMUS_TOKEN_FILE", str(token))
    found = [each for each in all_findings(examined(tmp_path)) if each.severity is ERROR]
    only(found, "token-unsafe", ERROR, f"rm -f {token}")


def test_a_machine_that_says_nothing_is_told() -> None:
    with pytest.raises(NoAnswerError), Examiner(("true",)) as examiner:
        examiner.facts(Wanted(), 5.0)
    with pytest.raises(NoAnswerError, match="No such file"), Examiner(("/no/such/program",)):
        pass
    with pytest.raises(NoAnswerError, match=r"within 0\.2 s"), Examiner(("sleep", "9")) as examiner:
        examiner.facts(Wanted(), 0.2)


def test_an_answer_of_a_later_build_is_read() -> None:
    text = '{"op": "answer", "result": {"host": "h", "user": "u", "clock_s": 1, "build": "9", "later": {"x": []}, '
    text += '"control_protocols": [2, 9], "exchange_protocols": [2, 9], "python": "4", '
    text += '"torch": "9"}}'
    with Examiner(("sh", "-c", f"read line; echo '{text}'; sleep 9")) as examiner:
        assert examiner.facts(Wanted(), 5.0).build == "9"
