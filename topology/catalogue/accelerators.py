"""The accelerators that ship: read when a topology first names one that it does not define."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Annotated, ClassVar

from isthmus.topology.spec.expected_devices import OWN_NAMES
from isthmus.topology.spec.suggest import did_you_mean, one_of
from isthmus.topology.spec.world import Accelerator
from isthmus.topology.spec.yaml_keys import Bounds, Name, Section, Text
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import read_document

_FILE = "accelerators.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry(Accelerator):
    """One accelerator of the catalogue file."""

    source: Text
    """The document that its figures come from."""

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator by itself, as a topology has it."""
        return Accelerator(**{each.name: getattr(self, each.name) for each in fields(Accelerator)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Catalogue(Section):
    """The whole catalogue file."""

    is_document: ClassVar[bool] = True
    accelerators: Annotated[Mapping[Name, CatalogueEntry], Bounds(min_length=1)]


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all entries by name, in the file's order.

    Raises:
        ConfigError: the file is damaged.
    """
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    document = read_document(text, _FILE)
    written = validate(document, _Catalogue)
    document.raise_problems()
    assert written is not None, "a catalogue that is not valid has problems"
    return {name: replace(entry, name=name) for name, entry in written.accelerators.items()}


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
