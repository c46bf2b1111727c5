"""The sites that take part in a run, and how many sequences of a step each takes. Pure.

A job's `placement` names them; a job without one spreads its batch over the ranks of all sites.
After `placed`, all code sees a topology of only the sites that take part, with their own indices.

The run may begin with some of them (`begin_with`), and others are added later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set

from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import degrees_of, misfit, workload_described
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.spec.trainer_cuts import is_uneven, why_no_ring, why_not
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.text.yaml_document import Path

Misplaced = tuple[Path, str]
"""A path in the job, and the problem there."""


def placed(job: Job, topology: Topology) -> Topology:
    """Return the topology of the sites that take part in a job; all of it without a placement.

    Sites with which the run begins come first, because the first site's initial parameters are used
    by all. `problems_of` must have found no problem.
    """
    if job.placement:
        topology = restricted(topology, [each.site for each in job.placement])
    if not job.begin_with:
        return topology
    order = sorted(topology.sites, key=lambda site: site.name not in job.begin_with)
    return dataclasses.replace(topology, sites=_numbered(order))


def restricted(topology: Topology, names: Sequence[str]) -> Topology:
    """Return a topology of these sites only, in its own order, and of the links between them.

    `failure.min_sites` is lowered to their number where it is more.
    """
    wanted = set(names)
    kept = [site for site in topology.sites if site.name in wanted]
    if len(kept) == len(topology.sites):
        return topology
    sites = _numbered(kept)
    links = tuple(
        link for link in topology.links if link.source in wanted and link.target in wanted
    )
    min_sites = min(topology.failure.min_sites, len(sites))
    return dataclasses.replace(
        topology,
        sites=sites,
        links=links,
        failure=dataclasses.replace(topology.failure, min_sites=min_sites),
    )


def _numbered(sites: Iterable[Site]) -> tuple[Site, ...]:
    return tuple(dataclasses.replace(site, index=index) for index, site in enumerate(sites))


def problems_of(job: Job, topology: Topology) -> list[Misplaced]:
    """Return problems with a job's sites; `topology` has all sites."""
    names = [site.name for site in topology.sites]
    problems: list[Misplaced] = []
    first: dict[str, int] = {}
    for index, each in enumerate(job.placement):
        if each.site not in names:
            hint = did_you_mean(each.site, names)
            problems.append((_path(index, "site"), f"unknown site {each.site!r}{hint}"))
        elif each.site in first:
            message = f"{each.site!r} is placed twice (first as placement.{first[each.site]})"
            problems.append((_path(index, "site"), message))
        else:
            problems += [*_too_few(job, topology, index), *_miscut(job, topology, index)]
        first.setdefault(each.site, index)
    total, batch = sum(each.sequences for each in job.placement), job.global_batch
    if job.placement and total != batch:
        section = "trainer" if job.entrypoint is None else "workload"
        message = (
            f"the sequences add up to {total}, and {section}.global_batch is {batch}: "
            "want both the same"
        )
        problems.append((("placement",), message))
    left_out = [name for name in names if name not in first]
    if job.placement and left_out and job.plan is not None and job.plan.sites == "all":
        message = f"plan.sites is all, and {', '.join(left_out)} has no place: want both to agree"
        problems.append((("placement",), message))
    problems += _without_device(job, topology)
    if job.placement and not problems:
        problems += _unconnected(restricted(topology, list(first)), ("placement",))
    if job.begin_with and not problems:
        problems += _problems_of_beginning(job, placed(job, topology))
    return problems


def _problems_of_beginning(job: Job, topology: Topology) -> list[Misplaced]:
    """Return problems with the sites of `begin_with`."""
    names, begin = [site.name for site in topology.sites], job.begin_with
    problems: list[Misplaced] = []
    for index, name in enumerate(begin):
        path: Path = ("begin_with", index)
        if name not in names:
            problems.append((path, f"unknown site {name!r}{did_you_mean(name, names)}"))
        elif name in begin[:index]:
            problems.append((path, f"{name!r} is named twice"))
    fewest = topology.failure.min_sites
    if len(begin) < fewest:
        message = f"failure.min_sites is {fewest}: want as many sites at least; got {len(begin)}"
        problems.append((("begin_with",), message))
    why = ""
    if job.plan is not None:
        why = "a plan decides which sites take part: want `begin_with` or `plan`, not both"
    elif job.probe is not None:
        why = "a probe measures the links of all sites"
    elif job.exchange.schedule == "off":
        why = "no site can be added where `exchange.schedule: off`"
    if why:
        problems.append((("begin_with",), why))
    return problems or _unconnected(restricted(topology, begin), ("begin_with",))


def _without_device(job: Job, topology: Topology) -> list[Misplaced]:
    """Return a problem if the trainer should offload at a site without accelerators."""
    taking_part = {each.site for each in job.placement}
    here = [site for site in topology.sites if not taking_part or site.name in taking_part]
    idle = [site.name for site in here if "cpu" in site.accelerator.name.lower()]
    if job.entrypoint is not None or not job.trainer.offload or not idle:
        return []
    message = f"{', '.join(idle)} computes on the host: there is nothing to offload from"
    return [(("trainer", "offload"), message)]


def _too_few(job: Job, topology: Topology, index: int) -> list[Misplaced]:
    """Return a problem if a rank has no sequence: the shipped trainer needs at least one."""
    wanted = job.placement[index]
    if job.entrypoint is not None:
        return []
    cut = wanted.parallel
    least = topology.site(wanted.site).num_ranks if cut is None else cut.data
    who = "rank" if cut is None else "replica"
    if wanted.sequences < least:
        message = (
            f"want at least {least}, a sequence for each {who} of {wanted.site!r}; "
            f"got {wanted.sequences}"
        )
    elif cut is not None and is_uneven(cut, wanted.sequences):
        message = (
            f"want a multiple of {cut.data}: with experts, or without a zero_stage, replicas take "
            f"equally many; got {wanted.sequences}"
        )
    else:
        return []
    return [(_path(index, "sequences"), message)]


def _miscut(job: Job, topology: Topology, index: int) -> list[Misplaced]:
    """Return problems with a written cut, which a plan would keep."""
    wanted, model = job.placement[index], job.workload
    cut, path = wanted.parallel, _path(index, "parallel")
    if cut is None:
        return []
    site = topology.site(wanted.site)
    num_ranks = site.num_ranks
    problems: list[Misplaced] = []
    if cut.num_ranks != num_ranks:
        message = (
            f"tensor {cut.tensor} x pipeline {cut.pipeline} x context {cut.context} x data "
            f"{cut.data} are {cut.num_ranks} ranks, and {wanted.site!r} has {num_ranks}: want both "
            "the same"
        )
        problems.append((path, message))
    if model is None:
        return problems
    if model.is_trainers:
        why = why_not(model, cut) or why_no_ring(job.trainer, cut, site)
    else:
        why = misfit(workload_described(model), degrees_of(cut, model))
    if why is not None:
        name, _, message = why.partition(": ")
        problems.append(((*path, name), message))
    if wanted.sequences < cut.data and not model.is_trainers:  # `_too_few` has reported it
        message = f"want at least {cut.data}, one for each replica; got {wanted.sequences}"
        problems.append((_path(index, "sequences"), message))
    if model.micro_batch not in (None, cut.micro_batch):
        message = (
            f"workload.micro_batch is {model.micro_batch}: want the same; got {cut.micro_batch}"
        )
        problems.append(((*path, "micro_batch"), message))
    for name, most in dataclasses.asdict(model.at_most).items():
        degree = getattr(cut, name)
        if most is not None and degree > most:
            message = f"workload.at_most.{name} is {most}: want no more; got {degree}"
            problems.append(((*path, name), message))
    return problems


def _unconnected(topology: Topology, path: Path) -> list[Misplaced]:
    cut = unreached(topology)
    if not cut:
        return []
    message = (
        f"no links in both directions connect {topology.sites[0].name!r} with "
        f"{', '.join(map(repr, cut))}, without the sites that are left out"
    )
    return [(path, message)]


def unreached(topology: Topology) -> list[str]:
    """Return the sites that no links in both directions connect with the first one."""
    pairs = {(link.source, link.target) for link in topology.links}
    return unlinked([site.name for site in topology.sites], pairs)


def unlinked(names: Sequence[str], pairs: Set[tuple[str, str]]) -> list[str]:
    """Return the names that no pairs in both directions connect with the first one."""
    around: dict[str, list[str]] = {name: [] for name in names}
    for one, other in pairs:
        if (other, one) in pairs and one in around:
            around[one].append(other)
    reached = dict.fromkeys(names[:1])
    waiting = [*names[:1]]
    for name in waiting:
        new = [other for other in around[name] if other not in reached and other in around]
        reached.update(dict.fromkeys(new))
        waiting += new
    return [name for name in names if name not in reached]


def _path(index: int, key: str) -> Path:
    return ("placement", index, key)
