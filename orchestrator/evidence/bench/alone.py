"""One site by itself: the same job with that site's share of the batch, on a topology of one site.

Said as overrides of the two documents, so that a solo run is an ordinary run, and can be repeated
by hand with `isthmus launch --set`.
"""

from __future__ import annotations

import json

from orchestrator.documents import Pair, load_pair
from topology.cost.compute import site_shares
from topology.documents.references import ancestry, site_names
from topology.text.document import Document
from topology.text.overrides import read_with_overrides
from topology.world import Site

_INHERITED = ("nodes", "accelerators_per_node", "accelerator", "fabric", "launcher")


def alone(pair: Pair, site: Site) -> Pair:
    """Return the documents of `site`'s solo run; `pair` is what all sites run together.

    Nothing in it depends on links, codecs or trees, so that many settings share one solo run: the
    exchange is off, and its settings are the defaults but for the size of buckets, which ranks
    inside the site reduce too.
    """
    topology = read_with_overrides(
        pair.topology_text, str(pair.topology_path), pair.topology_overrides
    )
    job = read_with_overrides(pair.job_text, str(pair.job_path), pair.job_overrides)
    return load_pair(
        pair.job_path,
        [
            *pair.topology_overrides,
            *pair.job_overrides,
            *_topology_overrides(topology, site),
            *_job_overrides(job, site.name, sum(site_shares(pair.job, pair.topology, site))),
        ],
        pair.topology_path,
    )


def _topology_overrides(document: Document, site: Site) -> list[str]:
    coordinator = {**document.mapping("coordinator")}
    if coordinator.get("site") != site.name:
        coordinator.pop("site", None)
    return [
        _override("sites", [_written_out(document, site_names(document).index(site.name))]),
        _override("links", []),
        _override("emulate", False),
        _override("failure.min_sites", 1),
        _override("coordinator", coordinator),
    ]


def _job_overrides(document: Document, site: str, share: int) -> list[str]:
    placement = [{"site": site, "sequences": share}] if document.get("plan") is not None else []
    bucket = document.get("exchange", "bucket")
    exchange = {"schedule": "off", **({} if bucket is None else {"bucket": bucket})}
    return [
        _override("exchange", exchange),
        _override("reduction", {}),
        _override("verify", {"parameters_every": 0}),
        _override("timeline", {"every": 0}),
        _override("trainer.global_batch", share),
        _override("placement", placement),
        # Placed as it is, there is nothing to plan, and what a plan might decide is no difference.
        *([] if document.get("plan") is None else [_override("plan", {})]),
    ]


def _written_out(document: Document, index: int) -> dict[str, object]:
    """Return a site as the file has it, with what it takes from others written in its own entry."""
    chain = [document.mapping("sites", each) for each in ancestry(document, index)]
    own = {key: value for key, value in chain[0].items() if key != "like"}
    for key in _INHERITED:
        found = next((each[key] for each in chain if each.get(key) is not None), None)
        if found is not None:
            own[key] = found
    return own


def _override(path: str, value: object) -> str:
    # JSON is YAML in which a text cannot be taken for anything else: `off` stays a word.
    return f"{path}={json.dumps(value, ensure_ascii=False)}"
