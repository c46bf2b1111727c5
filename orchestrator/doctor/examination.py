"""Collects the facts about a topology's machines, and has them checked.

The sites on this machine are examined from here, and those elsewhere to which a command leads. Any
other is examined by the same command, with `--site`, on its own machine.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.doctor.certificate_checks import certificate_findings
from isthmus.orchestrator.doctor.document_checks import light_problems, wanted_files
from isthmus.orchestrator.doctor.examiner import FACTS, HERE, Examiner, NoAnswerError
from isthmus.orchestrator.doctor.findings import Finding, Severity, in_order
from isthmus.orchestrator.doctor.job_checks import job_findings
from isthmus.orchestrator.doctor.kinds import finding
from isthmus.orchestrator.doctor.machine_checks import (
    Machine,
    bound_hosts,
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
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.protos.checkpoint.store import opened
from isthmus.protos.errors import IsthmusError
from isthmus.protos.identities import AGENT, COORDINATOR, GATEWAY, OPERATOR
from isthmus.protos.private_files import UnsafeFileError, read_secret
from isthmus.protos.security import tls_files, token_path
from isthmus.topology.spec.addresses import is_loopback
from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.machine_facts import Wanted
from isthmus.topology.spec.units import format_duration, format_rate
from isthmus.topology.spec.world import Site, Topology

_T = TypeVar("_T")
ANSWER_S = 60.0
"""Torch may have to be imported, from a slow disk."""
_DEVICES = frozenset({"accelerators-missing", "accelerators-differ"})
"""Kinds of warnings that `launch` shows, too."""
BURN_IN_S = 300.0
"""Time allowed for a burn-in to start its processes, beside the time that was asked for."""
REACH_S = 3.0
"""A connection that takes longer is not there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What a topology, and perhaps a job, are to be examined for."""

    topology: Topology
    """The sites that take part."""
    job: Job | None
    job_path: Path | None
    home: Path
    """Where a run's files will be."""
    too_quick: tuple[Problem, ...] = ()
    """Links of the topology that are quicker than light."""

    @property
    def checkpoints(self) -> list[str]:
        """The folders of the job's checkpoints."""
        if self.job is None or self.job.checkpoint is None:
            return []
        assert self.job_path is not None
        folder = os.path.abspath(self.job_path.parent)  # noqa: PTH100 - a link stays as written
        stores = [store for store in self.job.checkpoint.to if "://" not in store]
        return [os.path.join(folder, store) for store in stores]  # noqa: PTH118

    def wanted(self, sites: Sequence[Site]) -> Wanted:
        """Return what the machine of these sites is asked."""
        files = Wanted()
        if self.job is not None and self.job_path is not None:
            # Several sites of one machine have the files that the first of them has.
            job_folder = sites[0].job_folder if sites else ""
            if job_folder or not sites or sites[0].launcher.kind == "local":  # else it is carried
                files = wanted_files(self.job, self.job_path, job_folder)
        names = {site.name for site in sites}
        folders = [str(self.home / "runs"), *self.checkpoints]
        return dataclasses.replace(
            files,
            addresses=tuple(dict.fromkeys(host for site in sites for host in bound_hosts(site))),
            interfaces=tuple(dict.fromkeys(each for site in sites for each in site.interfaces)),
            peers=tuple(
                dict.fromkeys(
                    host
                    for site in self.topology.sites
                    if site.name not in names and site.inbound and site.dialled
                    for host in (site.dialled, *site.hosts[1:])
                )
            ),
            folders=tuple(folders),
        )


def examined_of(pair: Pair, home: Path) -> Examined:
    """Return the examination of a job on its topology."""
    return Examined(
        topology=pair.topology,
        job=pair.job,
        job_path=pair.job_path,
        home=home,
        too_quick=tuple(light_problems(pair)),
    )


def quick_findings(examined: Examined) -> list[Finding]:
    """Return what would fail a run of which all is on this machine, and what its job's files are.

    Takes less than 0.1 s.
    """
    sites = examined.topology.sites
    try:
        with Examiner() as examiner:
            facts = examiner.facts(examined.wanted(sites), ANSWER_S)
    except NoAnswerError as error:
        return [_unexamined(None, str(error))]
    machine = Machine(name=None, sites=sites, facts=facts)
    found = [*_of_machine(examined, machine), *_store(examined)]
    shown = [each for each in found if each.severity is Severity.ERROR or each.path]
    return in_order([*shown, *(each for each in found if each.kind in _DEVICES)])


def all_findings(
    examined: Examined,
    only: str | None = None,
    reached: Mapping[str, Sequence[str]] | None = None,
    *,
    burn_in_s: float = 0.0,
) -> list[Finding]:
    """Return everything that is not as it should be, as far as it can be seen from this machine.

    Args:
        examined: What is examined.
        only: The site that this machine is; None: whichever sites' addresses are this machine's.
        reached: Sites that are elsewhere, and the command that is Python there.
        burn_in_s: For how long the devices of each machine are loaded; 0: they are not.
    """
    topology, found = examined.topology, [_too_quick(each) for each in examined.too_quick]
    elsewhere = reached or {}
    sites = [site for site in topology.sites if only is None or site.name == only]
    with ExitStack() as stack:
        seen: list[tuple[Examiner, Machine]] = []
        for site in [site for site in topology.sites if site.name in elsewhere]:
            own, further = _hosts(site)
            command = [*elsewhere[site.name], *FACTS]
            seen += _seen_there(stack, examined, site.name, own, command, found)
            for host in further:
                command = [*elsewhere[site.name], *FACTS, *_onward(site, host)]
                name = f"{site.name} ({host.address})"
                seen += _seen_there(stack, examined, name, host, command, found)
        try:
            rest = [site for site in sites if site.name not in elsewhere]
            seen += _seen_here(stack, examined, rest, only, found)
        except NoAnswerError as error:
            found.append(_unexamined(only, str(error)))
        found += _checked(examined, seen)
        if burn_in_s:
            for examiner, machine in seen:
                found += _burn_in(examiner, machine.name, burn_in_s)
    if topology.emulate and only is None:
        found += _emulation(topology)
    here = [site.name for _, each in seen if each.name == only for site in each.sites]
    found += _store(examined)
    return in_order([*found, *_certificates(topology, here, only), *_secret(only)])


def _burn_in(examiner: Examiner, name: str | None, for_s: float) -> list[Finding]:
    """Load a machine's devices; return which of them is wrong, and which is not."""
    try:
        burned = examiner.burn_in(for_s, for_s + BURN_IN_S)
    except NoAnswerError as error:
        return [_unexamined(name, str(error))]
    return [
        finding("device-wrong", name, device=each.device, index=each.index, problem=each.problem)
        if each.problem
        else finding(
            "device-right",
            name,
            device=each.device,
            index=each.index,
            products=each.num_products,
            for_=format_duration(for_s),
            rate=format_rate(each.copy_bytes_per_s),
        )
        for each in burned
    ]


def _store(examined: Examined) -> list[Finding]:
    """Find that URLs as the one where checkpoints go cannot be opened with what is installed here.

    Nothing is asked of the store itself.
    """
    job = examined.job
    if job is None or job.checkpoint is None:
        return []
    found = []
    for url in (store for store in job.checkpoint.to if "://" in store):
        try:
            with opened(url):
                pass
        except OSError as error:
            found.append(finding("checkpoints-not-openable", url=url, error=error.strerror))
    return found


def _hosts(site: Site) -> tuple[Site, list[Site]]:
    """Return a site's first machine, and those that it reaches by ssh, each as a site of its own.

    Others are all one machine (`local`), or Slurm says which they are.
    """
    if site.launcher.kind != "ssh" or len(site.hosts) < 2:
        return site, []
    first, *rest = (
        dataclasses.replace(site, nodes=1, hosts=(host,), address=host) for host in site.hosts
    )
    return first, rest


def _onward(site: Site, host: Site) -> list[str]:
    """Return what has a site's first machine ask another one, as its agent reaches it."""
    python = ["--python", site.launcher.python] if site.launcher.python else []
    return ["--at", host.address, *python, *(f"--option={each}" for each in site.launcher.options)]


def _seen_there(
    stack: ExitStack,
    examined: Examined,
    name: str,
    site: Site,
    command: Sequence[str],
    found: list[Finding],
) -> list[tuple[Examiner, Machine]]:
    """Examine a machine by a command; that it does not answer goes to `found`."""
    try:
        examiner = stack.enter_context(Examiner(command))
        facts = examiner.facts(_wanted(examined, [site]), ANSWER_S)
    except NoAnswerError as error:
        found.append(_unexamined(name, str(error)))
        return []
    return [(examiner, Machine(name=name, sites=(site,), facts=facts))]


def _seen_here(
    stack: ExitStack,
    examined: Examined,
    sites: Sequence[Site],
    only: str | None,
    found: list[Finding],
) -> list[tuple[Examiner, Machine]]:
    """Examine this machine for those of the sites that are here; the others go to `found`."""
    examiner = stack.enter_context(Examiner())
    wanted = dataclasses.replace(
        _wanted(examined, sites), endpoints=_coordinator_endpoints(examined.topology, only)
    )
    facts = examiner.facts(wanted, ANSWER_S)
    refused = facts.refused or {}
    here = tuple(
        site
        for site in sites
        if only is not None
        or is_loopback(site.dialled)
        or (site.bound and site.bound not in refused)
    )
    found += [_elsewhere(site) for site in sites if site not in here]
    found += _coordinator(refused, wanted.endpoints)
    if not here:
        return []
    own = tuple(_hosts(site)[0] for site in here)
    seen = [(examiner, Machine(name=only, sites=own, facts=facts))]
    for site in here:
        for host in _hosts(site)[1]:
            command = [*HERE, *_onward(site, host)]
            name = f"{site.name} ({host.address})"
            seen += _seen_there(stack, examined, name, host, command, found)
    return seen


def _wanted(examined: Examined, sites: Sequence[Site]) -> Wanted:
    return dataclasses.replace(examined.wanted(sites), accelerators=True)


def _coordinator_endpoints(topology: Topology, only: str | None) -> tuple[str, ...]:
    """Return where a coordinator would listen on this machine, which may be one site (`only`)."""
    endpoint, site = topology.coordinator.bind, topology.coordinator.site
    is_elsewhere = None not in (site, only) and site != only
    if endpoint.port == 0 or is_elsewhere or not is_loopback(endpoint.host):
        return ()
    return (str(endpoint),)


def _checked(examined: Examined, seen: Sequence[tuple[Examiner, Machine]]) -> list[Finding]:
    """Return what is wrong with the machines that were seen, and between them."""
    topology, found = examined.topology, list[Finding]()
    by_site: dict[str, Machine] = {}
    further: list[Machine] = []
    for _, machine in seen:
        is_first = all(site.name not in by_site for site in machine.sites)
        by_site |= {site.name: machine for site in machine.sites} if is_first else {}
        further += [] if is_first else [machine]
        found += lane_findings(machine, topology) if is_first else []
    for examiner, machine in seen:
        found += _of_machine(examined, machine)
        if not topology.emulate:
            found += route_findings(machine, topology)
        try:
            found += _clock(examiner, machine.name, topology)
        except NoAnswerError as error:
            found.append(_unexamined(machine.name, str(error)))
    if not topology.emulate:
        found += tcp_findings(by_site, topology, examined.job)
        for machine in further:
            own = {site.name: machine for site in machine.sites}
            found += tcp_findings(own, topology, examined.job)
    found += torch_findings([machine for _, machine in seen])
    return [*found, *_connections(seen, topology)]


def _too_quick(problem: Problem) -> Finding:
    name = "quicker-than-light/emulated" if problem.is_warning else "quicker-than-light"
    return finding(name, file=problem.source, line=problem.line, message=problem.message)


def _of_machine(examined: Examined, machine: Machine) -> list[Finding]:
    found = machine_findings(machine, examined.topology, examined.checkpoints, examined.job)
    if examined.job is not None:
        found += job_findings(machine.facts, examined.job, machine.name)
    return found


def _clock(examiner: Examiner, only: str | None, topology: Topology) -> Iterator[Finding]:
    ahead_s, uncertain_s = examiner.clock_ahead_s(ANSWER_S)
    return clock_findings(
        only or "this machine",
        ahead_s,
        uncertain_s,
        has_certificates=topology.security.mode != "insecure",
    )


def _connections(seen: Sequence[tuple[Examiner, Machine]], topology: Topology) -> list[Finding]:
    """Try connections along each link between sites that were seen, in each direction.

    Of a site of several machines each is tried with the other site's first, and inside the site
    each further one dials the first: torch's store is there. Where gateways bind ports of a range,
    a firewall may let in some and not others, so each that they would take is tried, up to the
    first that fails.
    """
    machines: dict[str, list[tuple[Examiner, Site]]] = {}
    for examiner, machine in seen:
        for site in machine.sites:
            machines.setdefault(site.name, []).append((examiner, site))
    pairs = [
        pair
        for link in topology.links
        if link.source in machines and link.target in machines
        for pair in _pairs(machines[link.source], machines[link.target])
    ]
    for first, *rest in machines.values():
        pairs += [(each, first) for each in rest]
    found, ports = list[Finding](), dict[str, list[int]]()
    for (asks, source), (answers, target) in pairs:
        if not target.inbound or not target.bound:
            continue  # nobody dials it, or nobody knows where before its gateways run
        try:
            if target.dialled not in ports:
                ports[target.dialled] = _listen(answers, target)
            for port in ports[target.dialled]:
                tried = Tried(
                    source=source.name,
                    target=target.name,
                    source_address=source.bound,
                    target_address=target.dialled,
                    port=port,
                    error=asks.reach(source.bound, target.dialled, port, REACH_S),
                    ports=target.ports,
                )
                if tried.error is not None:
                    found += connection_findings(tried)
                    break
        except NoAnswerError as error:
            found.append(_unexamined(source.name, str(error)))
    return found


def _listen(examiner: Examiner, site: Site) -> list[int]:
    """Have a machine of a site listen on as many ports of a range as its gateways take.

    Where the system chooses ports, on one, which stands for all.

    Returns:
        The ports: fewer where others are taken, none where nothing can listen on that address,
        which has been found already.

    Raises:
        NoAnswerError: as of `Examiner.listen`.
    """
    given, ports = site.ports, list[int]()
    for _ in range(1 if given is None else site.gateways_per_node):
        port = examiner.listen(site.bound, given, ANSWER_S)
        if isinstance(port, str):
            break
        ports.append(port)
    return ports


def _pairs(sources: Sequence[_T], targets: Sequence[_T]) -> list[tuple[_T, _T]]:
    """Return who dials whom of two sites' machines: each once at least, the first ones the rest."""
    return [
        *((sources[0], each) for each in targets),
        *((each, targets[0]) for each in sources[1:]),
    ]


def _coordinator(refused: Mapping[str, str], endpoints: Sequence[str]) -> list[Finding]:
    """Return whether the coordinator's address is taken, by anything but a coordinator."""
    found = []
    for endpoint in endpoints:
        if endpoint not in refused:
            continue
        try:
            with Client(endpoint) as client:
                client.list_runs()
        except IsthmusError:
            facts = {"endpoint": endpoint, "port": endpoint.rpartition(":")[2]}
            name = "coordinator-address-refused"
            found.append(finding(name, **facts, reason=refused[endpoint]))
    return found


def _certificates(topology: Topology, here: Sequence[str], only: str | None) -> list[Finding]:
    """Return what is wrong with the certificates of this machine, which is those sites."""
    files = tls_files()
    if topology.security.mode == "insecure" or files is None:
        return []
    names = [f"{site}.{role}" for site in here for role in (AGENT, GATEWAY)]
    if only is None:
        names += [OPERATOR] if topology.coordinator.site else [OPERATOR, COORDINATOR]
    return certificate_findings(names, files)


def _secret(only: str | None) -> list[Finding]:
    """Return whether the secret that processes of one user share is one; it need not be there."""
    path = token_path()
    if not os.path.lexists(path):
        return []
    try:
        read_secret(path)
    except (UnsafeFileError, OSError) as error:
        return [finding("token-unsafe", only, error=error, quoted=shlex.quote(str(path)))]
    return []


def _emulation(topology: Topology) -> list[Finding]:
    if topology.emulator == "relay" or (reason := netns_problem()) is None:
        return []
    is_asked = topology.emulator == "netns"
    name = "no-network-namespaces/asked" if is_asked else "no-network-namespaces"
    return [finding(name, reason=reason)]


def _elsewhere(site: Site) -> Finding:
    return finding("not-examined", site.name, address=site.dialled, named=site.name)


def _unexamined(site: str | None, reason: str) -> Finding:
    return finding("no-answer", site, reason=reason)
