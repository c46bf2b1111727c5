"""YAML text to Topology and Job: every mistake at once, each at its line and column.

    text -> Document, with places -> overrides -> model (types, units), references -> dataclasses

Pure: whoever calls reads the file.
"""

from collections.abc import Sequence

from topology.documents.references import check_references
from topology.documents.resolve import resolve
from topology.faults.loading import FaultsModel
from topology.job import (
    Data,
    Exchange,
    Job,
    LinkCodec,
    Model,
    NamedTree,
    Optimizer,
    Placed,
    Probe,
    Reduction,
    Trainer,
)
from topology.models.job_model import (
    ExchangeModel,
    JobModel,
    PlacedModel,
    PlanModel,
    ProbeModel,
    ReductionModel,
    TrainerModel,
    WorkloadModel,
)
from topology.models.topology_model import TopologyModel
from topology.plan_wishes import PlanWishes, Replan
from topology.text.validation import validate
from topology.text.yaml_document import read_with_overrides
from topology.workload import DescribedModel, Limits, Parallel
from topology.world import Topology


def load_topology(text: str, source: str, overrides: Sequence[str] = ()) -> Topology:
    """Return the topology that a YAML text describes.

    Args:
        text: Of the whole file.
        source: What messages call it: the file's name.
        overrides: `path=value` each, as `links.0.rtt=120ms`; applied in order before the checks.

    Raises:
        ConfigError: with every problem.
    """
    document = read_with_overrides(text, source, overrides)
    model = validate(document, TopologyModel)
    check_references(document)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    topology = resolve(document, model)
    document.raise_problems()
    return topology


def load_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job that a YAML text describes; arguments and errors as of `load_topology`."""
    document = read_with_overrides(text, source, overrides)
    model = validate(document, JobModel)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    return Job(
        name=model.name,
        topology=model.topology,
        entrypoint=model.entrypoint,
        arguments=tuple(model.arguments),
        exchange=_exchange(model.exchange),
        reduction=_reduction(model.reduction),
        verify_every=model.verify.parameters_every,
        timeline_every=model.timeline.every,
        trainer=_trainer(model.trainer),
        probe=None if model.probe is None else _probe(model.probe),
        placement=tuple(map(_placed, model.placement)),
        plan=None if model.plan is None else _wishes(model.plan),
        workload=None if model.workload is None else _described(model.workload),
    )


def document_kind(text: str, source: str) -> str:
    """Return `topology`, `job`, `faults` or `plan`: which of them a YAML text is, or is closest to.

    Raises:
        ConfigError: it is not YAML, or not a mapping, or no closer to one of them than to another.
    """
    document = read_with_overrides(text, source, ())
    keys = set(document.mapping())
    own_keys = {
        "topology": _TOPOLOGY_KEYS,
        "job": _JOB_KEYS,
        "faults": _FAULTS_KEYS,
        "plan": _PLAN_KEYS,
    }
    matches = {kind: len(keys & own) for kind, own in own_keys.items()}
    kind, second = sorted(matches, key=matches.__getitem__, reverse=True)[:2]
    if matches[kind] == matches[second]:
        document.add(
            (),
            "neither a topology (which has sites) nor a job (which has a topology) "
            "nor a fault script (which has faults)",
        )
        document.raise_problems()
    return kind


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides meant for the topology, and those meant for the job, each in order.

    Their first key tells. What is a key of both (`name`) or of neither goes to the job, which
    tells of it.
    """
    is_topology = [override.split("=")[0].split(".")[0] in _TOPOLOGY_KEYS for override in overrides]
    pairs = list(zip(overrides, is_topology, strict=True))
    return [each for each, own in pairs if own], [each for each, own in pairs if not own]


_TOPOLOGY_KEYS = TopologyModel.model_fields.keys() - JobModel.model_fields.keys()
_JOB_KEYS = JobModel.model_fields.keys() - TopologyModel.model_fields.keys()
_FAULTS_KEYS = FaultsModel.model_fields.keys() - {"version"}
_PLAN_KEYS = {"made_for", "decisions", "predicted", "binding", "why", "alternatives"}
"""Of a plan file: more than it has in common with a topology."""


def _exchange(written: ExchangeModel) -> Exchange:
    return Exchange(
        codec=written.codec,
        codecs=tuple(
            LinkCodec(between=(each.between[0], each.between[1]), codec=each.codec)
            for each in written.codecs
        ),
        exact=tuple(written.exact),
        error_feedback=written.error_feedback,
        non_finite=written.non_finite,
        chunk_bytes=written.chunk,
        channels_per_link=written.channels_per_link,
        bucket_bytes=written.bucket,
        window_bytes=written.window,
        schedule=written.schedule,
    )


def _reduction(written: ReductionModel) -> Reduction:
    return Reduction(
        tree=written.tree,
        hub=written.hub,
        groups=tuple(tuple(group) for group in written.groups),
        trees=tuple(
            NamedTree(root=tree.root, parents=dict(tree.parents), weight=tree.weight)
            for tree in written.trees
        ),
    )


def _placed(written: PlacedModel) -> Placed:
    parallel = written.parallel
    return Placed(
        site=written.site,
        sequences=written.sequences,
        parallel=None if parallel is None else Parallel(**parallel.model_dump()),
    )


def _described(written: WorkloadModel) -> DescribedModel:
    at_most = Limits(**written.at_most.model_dump())
    return DescribedModel(**{**written.model_dump(), "at_most": at_most})


def _wishes(written: PlanModel) -> PlanWishes:
    return PlanWishes(
        codecs=tuple(written.codecs),
        sites=written.sites,
        max_sync_period=written.max_sync_period,
        objective=written.objective,
        micro_batch=written.micro_batch,
        gateways=written.gateways,
        replan=None
        if written.replan is None
        else Replan(
            drift=written.replan.drift,
            lasting_s=written.replan.lasting,
            gain=written.replan.gain,
        ),
    )


def _probe(written: ProbeModel) -> Probe:
    return Probe(
        connections=tuple(written.connections), echoes=written.echoes, window_s=written.window
    )


def _trainer(written: TrainerModel) -> Trainer:
    data = written.data
    return Trainer(
        compute=written.compute,
        steps=written.steps,
        global_batch=written.global_batch,
        micro_batch=written.micro_batch,
        seed=written.seed,
        evaluate_every=written.evaluate_every,
        evaluation_batches=written.evaluation_batches,
        model=Model(**written.model.model_dump()),
        data=Data(files=tuple(data.files), held_out=data.held_out, max_bytes=data.max_bytes),
        optimizer=Optimizer(**written.optimizer.model_dump()),
    )
