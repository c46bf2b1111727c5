"""What a job asks of its topology: rules over both documents, told at the job's lines."""

from collections.abc import Sequence

from topology.errors import ConfigError
from topology.job import Job
from topology.run_decisions import decide_reduction
from topology.run_spec import CodedPlan
from topology.text.yaml_document import Document, Path, read_with_overrides
from topology.world import Topology


def check_pair(
    job: Job,
    topology: Topology,
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    *,
    is_placed: bool = True,
) -> CodedPlan:
    """Check that a job can run on a topology, and return what its reduction comes to.

    Args:
        job: As `load_job` made it from the next arguments.
        topology: That it will run on.
        text: The job's YAML, for the places of problems.
        source: What messages call it.
        overrides: As given to `load_job`.
        is_placed: False: a plan has yet to say which of the sites take part, so that the batch need
            not have a sequence for the ranks of all of them.

    Raises:
        ConfigError: with every problem, each at the job's line.
    """
    problems: list[tuple[str, str]] = []
    reduction: CodedPlan | None = None
    try:
        reduction = decide_reduction(job, topology)
    except ConfigError as error:
        problems += [(each.path, each.message) for each in error.problems]
    batch, ranks = job.trainer.global_batch, topology.num_ranks
    if is_placed and job.entrypoint is None and job.probe is None and batch < ranks:
        fewer = not job.placement and batch >= min(site.num_ranks for site in topology.sites)
        cure = "; with a `plan` section, `launch` leaves sites out" if fewer else ""
        message = f"want at least {ranks}, a sequence for each rank of {topology.name!r}"
        problems.append(("trainer.global_batch", f"{message}; got {batch}{cure}"))
    if reduction is not None and not problems:
        return reduction
    document = read_with_overrides(text, source, overrides)
    for path, message in problems:
        document.add(_path(document, path), message)
    raise ConfigError(document.problems)


def _path(document: Document, dotted: str) -> Path:
    """Return the path that `reduction.trees.0.root` means: positions in lists are numbers."""
    path: Path = ()
    for part in dotted.split("."):
        inside = isinstance(document.get(*path), list)
        path = (*path, int(part) if inside else part)
    return path
