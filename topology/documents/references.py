"""Checks of a topology file's references: names must exist, and links must connect.

These checks use plain values, not the models, so that they also run when another part of the file
is wrong, and all mistakes are reported at once. Values of a wrong type are skipped;
topology/text/validation.py reports them.
"""

from collections.abc import Iterator

from pydantic import TypeAdapter, ValidationError

from isthmus.topology.catalogue.accelerators import catalogue, suggestion
from isthmus.topology.documents.placement import unlinked
from isthmus.topology.spec.addresses import is_loopback
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import LOOPBACK, Detection, Launcher, parse_endpoint
from isthmus.topology.spec.yaml_models import model_of
from isthmus.topology.text.yaml_document import Document, Path

LOOPBACK_INTERFACE = "lo"
WILDCARDS = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared with, not bound
_REQUIRED = ("nodes", "accelerators_per_node", "accelerator")


def check_references(document: Document) -> None:
    """Add a problem to a topology document for each invalid reference."""
    _check_site_names(document)
    _check_accelerators(document)
    _check_likes(document)
    _check_links(document)
    _check_coordinator(document)
    _check_listening(document)
    _check_failure(document)
    _check_security(document)
    _check_launchers(document)


def site_names(document: Document) -> list[str]:
    """Return the sites' names in order, without invalid ones."""
    names = (document.text("sites", index, "name") for index in _sites(document))
    return [name for name in names if name is not None]


def ancestry(document: Document, index: int) -> list[int]:
    """Return the positions of a site and its chain of `like` references.

    The chain ends before a name that does not exist or repeats.
    """
    # Of two sites with one name the first counts; the other is reported as a duplicate.
    positions = {document.text("sites", each, "name"): each for each in reversed(_sites(document))}
    chain = [index]
    while (like := document.text("sites", chain[-1], "like")) is not None:
        if positions.get(like, index) in chain:
            break
        chain.append(positions[like])
    return chain


def _sites(document: Document) -> range:
    return range(len(document.sequence("sites")))


def _check_site_names(document: Document) -> None:
    first: dict[str, int] = {}
    for index in _sites(document):
        name = document.text("sites", index, "name")
        if name is None:
            continue
        if name in first:
            where = _first_at(document, ("sites", first[name], "name"))
            document.add(("sites", index, "name"), f"duplicate site {name!r} ({where})")
        first.setdefault(name, index)


def _check_accelerators(document: Document) -> None:
    own = document.mapping("accelerators")
    for index in _sites(document):
        name = document.text("sites", index, "accelerator")
        if name is not None and name not in own and name not in catalogue():
            hint = suggestion(name, own) or ": define it under accelerators, or take one that ships"
            message = f"unknown accelerator {name!r}{hint}"
            document.add(("sites", index, "accelerator"), message)


def _check_likes(document: Document) -> None:
    names = site_names(document)
    for index in _sites(document):
        path = ("sites", index, "like")
        like = document.text(*path)
        if like is not None and like not in names:
            document.add(path, f"unknown site {like!r}{did_you_mean(like, names)}")
            continue
        chain = ancestry(document, index)
        end = document.text("sites", chain[-1], "like")
        if end is not None and end == document.text("sites", index, "name"):
            steps = [document.text("sites", each, "name") or "?" for each in chain]
            document.add(
                path, f"sites are like each other in a circle: {' -> '.join([*steps, end])}"
            )
        elif "like" not in document.mapping("sites", index):
            _check_required(document, index)


def _check_required(document: Document, index: int) -> None:
    """Check that each site without `like` has all required keys."""
    site = document.get("sites", index)
    for key in _REQUIRED:
        if isinstance(site, dict) and key not in site:
            document.add(("sites", index), f"missing key {key!r}")


def _link_ends(document: Document) -> Iterator[tuple[int, str, str]]:
    """Yield (position, source, target) of each link with valid end names."""
    for index in range(len(document.sequence("links"))):
        ends = document.sequence("links", index, "between")
        if len(ends) == 2:
            source, target = (document.text("links", index, "between", end) for end in (0, 1))
            if source is not None and target is not None:
                yield index, source, target


def _check_links(document: Document) -> None:
    names = site_names(document)
    sound = 0 < len(set(names)) == len(_sites(document))
    pairs: dict[tuple[str, str], int] = {}
    for index, source, target in _link_ends(document):
        for end, name in enumerate((source, target)):
            if name not in names:
                sound = False
                hint = did_you_mean(name, names)
                document.add(("links", index, "between", end), f"unknown site {name!r}{hint}")
        if source == target:
            sound = False
            document.add(("links", index, "between", 1), f"a link from {source!r} to itself")
        else:
            _take_pairs(document, pairs, index, (source, target))
    _check_figures(document)
    _check_dialling(document)
    if sound and len(list(_link_ends(document))) == len(document.sequence("links")):
        _check_connected(document, names, set(pairs))


def _first_at(document: Document, path: Path) -> str:
    """Return where a value first occurs: its line, or an override."""
    line = document.place(path).line
    return f"first at line {line}" if line else "first in an override"


def _take_pairs(
    document: Document, pairs: dict[tuple[str, str], int], index: int, pair: tuple[str, str]
) -> None:
    """Add the directions of a link to `pairs`; report a duplicate."""
    directions = [pair]
    if document.get("links", index, "oneway") is not True:
        directions.append((pair[1], pair[0]))
    for source, target in directions:
        if (source, target) in pairs:
            where = _first_at(document, ("links", pairs[source, target], "between"))
            document.add(
                ("links", index, "between"),
                f"a second link from {source!r} to {target!r} ({where})",
            )
            break
    for direction in directions:
        pairs.setdefault(direction, index)


def _check_figures(document: Document) -> None:
    """Check that each link has a bandwidth, and a figure from which its RTT follows."""
    located = {
        document.text("sites", index, "name")
        for index in _sites(document)
        if "location" in document.mapping("sites", index)
    }
    for index, link in enumerate(document.sequence("links")):
        measured = document.mapping("links", index, "measured")
        if isinstance(link, dict) and "bandwidth" not in link.keys() | measured.keys():
            document.add(("links", index), "missing key 'bandwidth'")
    for index, source, target in _link_ends(document):
        link = document.mapping("links", index)
        measured = document.mapping("links", index, "measured")
        if not {"rtt", "distance"} & link.keys() and "rtt" not in measured:
            missing = [name for name in (source, target) if name not in located]
            if missing and set(missing) <= set(site_names(document)):
                document.add(
                    ("links", index),
                    "nothing gives an RTT: want rtt, distance, measured.rtt, or a location of "
                    + " and ".join(repr(name) for name in missing),
                )


def _check_dialling(document: Document) -> None:
    """Check that of two sites with a link at least one can be dialled."""
    shut = {
        document.text("sites", index, "name")
        for index in _sites(document)
        if document.get("sites", index, "wan", "inbound") is False
    }
    for index, source, target in _link_ends(document):
        if {source, target} <= shut:
            message = (
                f"neither {source!r} nor {target!r} can be dialled (inbound: false): leave the "
                "link out, and trees go around it"
            )
            document.add(("links", index, "between"), message)


def _check_connected(document: Document, names: list[str], pairs: set[tuple[str, str]]) -> None:
    """Check that links in both directions connect all sites."""
    cut = unlinked(names, pairs)
    if cut:
        path = ("links",) if document.get("links") is not None else ("sites",)
        document.add(
            path,
            f"no links in both directions connect {names[0]!r} with "
            + ", ".join(repr(name) for name in cut),
            at_key=True,
        )


def _check_coordinator(document: Document) -> None:
    name, names = document.text("coordinator", "site"), site_names(document)
    if name is not None and name not in names:
        document.add(("coordinator", "site"), f"unknown site {name!r}{did_you_mean(name, names)}")


def _check_listening(document: Document) -> None:
    """Check that listening addresses determine the address that others dial."""
    for index in _sites(document):
        path = ("sites", index, "wan")
        written = document.mapping(*path)
        for key in ("bind", "interfaces", "ports"):
            if key in written and written.get("inbound") is False:
                document.add((*path, key), "has no use with inbound: false", at_key=True)
        if "bind" in written and written.get("interfaces"):
            document.add((*path, "bind"), "has no use with interfaces", at_key=True)
        is_told = "address" in written or document.get("sites", index, "hosts")
        if written.get("bind") in WILDCARDS and not is_told:
            message = "binds every address of the machine: want address, that others can dial"
            document.add((*path, "bind"), message)
        if "address" in written and document.get("sites", index, "hosts"):
            message = "has no use with hosts: others dial each of these"
            document.add((*path, "address"), message, at_key=True)
        if written.get("address") in WILDCARDS:
            message = "nobody can dial every address: want one here, and bind: with this"
            document.add((*path, "address"), message)
    told = document.get("coordinator", "address")
    if isinstance(told, str) and told.endswith(":0"):
        document.add(("coordinator", "address"), "want the port that others dial, not 0")


def _check_failure(document: Document) -> None:
    wanted, there = document.get("failure", "min_sites"), len(document.sequence("sites"))
    if isinstance(wanted, int) and wanted > there > 0:
        document.add(
            ("failure", "min_sites"), f"want at most {there}, the number of sites; got {wanted}"
        )
    try:
        Timeouts.derive(TypeAdapter(Detection).validate_python(document.get("failure") or {}))
    except ConfigError as error:
        for problem in error.problems:
            document.add(tuple(problem.path.split(".")), problem.message)
    except ValidationError:
        return


def _check_security(document: Document) -> None:
    """Check that without TLS all listening addresses are loopback."""
    if document.text("security", "mode") == "mtls":
        return
    for index in _sites(document):
        for key in ("address", "bind"):
            host = document.text("sites", index, "wan", key)
            if host is not None and not is_loopback(host):
                document.add(("sites", index, "wan", key), _EXPOSED.format(host))
        for place, name in enumerate(document.sequence("sites", index, "hosts")):
            if isinstance(name, str) and not is_loopback(name):
                document.add(("sites", index, "hosts", place), _EXPOSED.format(name))
        if document.get("sites", index, "wan", "proxy") is not None:
            message = f"would read all that the agent says: want {_PROTECTED}"
            document.add(("sites", index, "wan", "proxy"), message)
        for place, name in enumerate(document.sequence("sites", index, "wan", "interfaces")):
            if name != LOOPBACK_INTERFACE:
                path = ("sites", index, "wan", "interfaces", place)
                document.add(path, f"{name!r} is not {LOOPBACK_INTERFACE}: want {_PROTECTED}")
    for key in ("bind", "address"):
        try:
            host = parse_endpoint(document.get("coordinator", key) or f"{LOOPBACK}:0").host
        except ValueError:
            continue
        if not is_loopback(host):
            document.add(("coordinator", key), _EXPOSED.format(host))
    for key in ("ca", "cert", "key"):
        if document.get("security", key) is not None:
            document.add(("security", key), "has no use with mode: insecure", at_key=True)


_PROTECTED = "security: {mode: mtls}"
_EXPOSED = (
    "{!r} is not a loopback address: want one in 127.0.0.0/8 or ::1, or security: {{mode: mtls}}"
)


_LAUNCHER = model_of(Launcher).model_fields.keys()
_LAUNCHER_KEYS = {
    "local": {"kind", "python", "folder"},
    "ssh": _LAUNCHER,
    "slurm": _LAUNCHER,
}


def _check_launchers(document: Document) -> None:
    """Check that each launcher has the keys that it needs, and no unused ones."""
    for index in _sites(document):
        path = ("sites", index, "launcher")
        written = document.mapping(*path)
        kind = written.get("kind", "local")
        known = _LAUNCHER_KEYS.get(kind) if isinstance(kind, str) else None
        if known is None:
            continue
        for key in written:
            if key in _LAUNCHER and key not in known:
                document.add((*path, key), f"has no use with kind: {kind}", at_key=True)
        if kind == "ssh" and "host" not in written:
            document.add(path, "missing key 'host'")
        if kind == "slurm" and "host" not in written:
            for key in ("user", "port", "key", "known_hosts", "jump"):
                if key in written:
                    document.add((*path, key), "has no use without host", at_key=True)
