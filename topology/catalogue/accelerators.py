"""The accelerators that ship: read when a topology first names one that it does not define."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

from pydantic import Field

from isthmus.topology.models.topology_model import AcceleratorModel
from isthmus.topology.spec.expected_devices import OWN_NAMES
from isthmus.topology.spec.suggest import did_you_mean, one_of
from isthmus.topology.spec.world import Accelerator
from isthmus.topology.spec.yaml_keys import Name, Text, Version
from isthmus.topology.spec.yaml_models import Strict
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import read_document

_FILE = "accelerators.yaml"


class _EntryModel(AcceleratorModel):
    """One accelerator of the catalogue file, and the document that its figures come from."""

    source: Text


class _CatalogueModel(Strict):
    """The whole catalogue file."""

    version: Version
    accelerators: Annotated[dict[Name, _EntryModel], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One accelerator of the catalogue."""

    accelerator: Accelerator
    source: str
    """The document that its figures come from."""


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all entries by name, in the file's order.

    Raises:
        ConfigError: the file is damaged.
    """
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    document = read_document(text, _FILE)
    model = validate(document, _CatalogueModel)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    return {
        name: CatalogueEntry(accelerator_of(name, entry), entry.source)
        for name, entry in model.accelerators.items()
    }


def accelerator_of_device(device: str) -> Accelerator | None:
    """Return the accelerator of a device by that device's own name; None: it is not known."""
    name = OWN_NAMES.get(device)
    return None if name is None else catalogue()[name].accelerator


def suggestion(name: str, own: Iterable[str]) -> str:
    """Return ` (did you mean 'h100-pcie' or 'h100-sxm'?)` for `h100`, what is close, or nothing.

    `own` is what the topology defines itself.
    """
    known = [*own, *catalogue()]
    begun = [each for each in known if each.startswith(f"{name}-".casefold())]
    if begun:
        return f" (did you mean {one_of(begun)}?)"
    return did_you_mean(name, known)


def accelerator_of(name: str, written: AcceleratorModel) -> Accelerator:
    """Return an accelerator as a document has it, in base units."""
    return Accelerator(
        name=name,
        peak_flops_per_s={str(dtype): rate for dtype, rate in written.peak.items()},
        memory_bytes=written.memory,
        mfu=written.mfu,
        price_usd_per_h=written.price,
    )
