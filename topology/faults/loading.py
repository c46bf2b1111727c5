"""YAML text to FaultScript: every mistake at once, each at its line and column.

As topology.documents.load does it for the other two documents. Pure: whoever calls reads the file.
"""

from topology.faults.models import FaultModel, FaultsModel
from topology.faults.references import check_fault_references, crossing, directions
from topology.faults.script import ACTIONS, Fault, FaultScript, Pair, figures_of
from topology.text.overrides import read_with_overrides
from topology.text.validation import validate
from topology.world import Topology


def check_faults(text: str, source: str, topology: Topology | None = None) -> int:
    """Return how many faults a script has; without a topology, which names exist is not checked.

    Raises:
        ConfigError: with every problem.
    """
    return len(_read(text, source, topology).faults)


def load_faults(text: str, source: str, topology: Topology) -> FaultScript:
    """Return the fault script that a YAML text describes.

    Args:
        text: Of the whole file.
        source: What messages call it: the file's name.
        topology: Whose sites and links it names.

    Raises:
        ConfigError: with every problem, each at its line and column.
    """
    model = _read(text, source, topology)
    return FaultScript(
        seed=model.seed,
        faults=tuple(_fault(written, topology) for written in model.faults),
        links=figures_of(topology),
    )


def _read(text: str, source: str, topology: Topology | None) -> FaultsModel:
    document = read_with_overrides(text, source, ())
    model = validate(document, FaultsModel)
    check_fault_references(document, topology)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    return model


def _fault(written: FaultModel, topology: Topology) -> Fault:
    action = next(each for each in ACTIONS if getattr(written, each) is not None)
    return Fault(
        action=action,
        at_s=written.at,
        for_s=written.for_,
        links=_links(written, action, topology),
        figures=_figures(written) if action == "link" else None,
        up_s=written.up,
        down_s=written.down,
        site=written.pause or "",
    )


def _links(written: FaultModel, action: str, topology: Topology) -> tuple[Pair, ...]:
    if action == "pause":
        return ()
    if written.partition is not None:
        return crossing(topology, written.partition)
    ends = getattr(written, action)
    if not ends:  # heal: all
        return tuple((link.source, link.target) for link in topology.links)
    if action in ("reset", "half_open"):  # of connections, which have both directions
        return ((ends[0], ends[1]),)
    return directions(topology, (ends[0], ends[1]), oneway=bool(written.oneway))


def _figures(written: FaultModel) -> dict[str, float]:
    """Return the figures that a fault gives, by their names in Change."""
    values = {
        "bytes_per_s": written.rate,
        "delay_s": None if written.rtt is None else written.rtt / 2,
        "jitter_s": written.jitter,
        "loss": written.loss,
    }
    return {name: value for name, value in values.items() if value is not None}
