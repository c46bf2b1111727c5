"""Finds round trips shorter than light in fibre needs for the described distance. Pure."""

from __future__ import annotations

from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.geography import least_rtt_of_distance
from isthmus.topology.spec.units import format_distance, format_duration
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import Document, Path


def too_quick_links(document: Document, topology: Topology) -> list[Problem]:
    """Return problems for links whose RTT no fibre could have; `topology` is the document's.

    An error if the WAN is real and the figure was described. A warning if the WAN is emulated, or
    if the figure was measured: then the sites' locations or the distance are wrong.
    """
    problems = []
    for index in range(len(document.sequence("links"))):
        ends = [document.text("links", index, "between", end) for end in (0, 1)]
        link = topology.link(ends[0] or "", ends[1] or "")
        if link is None or link.distance_km is None:
            continue
        least_s = least_rtt_of_distance(link.distance_km)
        is_measured = link.rtt_origin == "measured"
        written_s = link.described_rtt_s if is_measured else link.rtt_s
        figures: list[tuple[Path, float | None]] = [
            (("links", index, "rtt"), written_s),
            (("links", index, "measured", "rtt"), link.rtt_s if is_measured else None),
        ]
        for path, rtt_s in figures:
            if document.get(*path) is None or rtt_s is None or rtt_s >= least_s:
                continue
            origin = "distance" if document.get("links", index, "distance") else "locations"
            message = (
                f"{format_duration(rtt_s)} is less than light in fibre takes for the "
                f"{format_distance(link.distance_km)} between {link.source!r} and "
                f"{link.target!r}, {format_duration(least_s)} there and back: correct it, or the "
                + origin
            )
            may_be = topology.emulate or path[-2] == "measured"
            problems.append(document.problem(path, message, is_warning=may_be))
    return problems
