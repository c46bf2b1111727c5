"""Chooses gradients that cross as fp32 although the codec rounds: by dimensions, and by name.

Gains and biases have one dimension, and are so few that their size does not count. Each acts on a
whole channel. Besides, a block of them has quite different ones, and its scale would be that of the
largest. `exchange.exact` adds what a job's author names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import torch

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Exchange
from isthmus.topology.trees.codec_costs import LOSSLESS

Named = tuple[str, torch.Tensor]
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def bare_name(name: str) -> str:
    """Return a parameter's name without those of wrappers: checkpointing, torch.compile."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


class Exactness:
    """The rule of one job: which gradients cross as fp32. Every rank of every site has the same."""

    def __init__(self, exchange: Exchange) -> None:
        """Take the rule of a job's exchange."""
        codecs = (exchange.codec, *(each.codec for each in exchange.codecs))
        self.is_lossy = not LOSSLESS.issuperset(codecs)
        """Whether there is anything to spare a gradient from."""
        self._patterns = exchange.exact
        self._bare = tuple(map(bare_name, exchange.exact))
        self._matches: dict[str, bool] = {}

    def check(self, names: Sequence[str]) -> None:
        """Refuse a pattern that spares none of these parameters: it is misspelt, or has no use.

        Raises:
            ConfigError: there is such a pattern, and the codec rounds.
        """
        bare = [*map(bare_name, names)]
        for pattern in self._patterns if self.is_lossy else ():
            if not fnmatch.filter(bare, bare_name(pattern)):
                known = ", ".join(names[:3])
                raise ConfigError(
                    f"exchange.exact: no parameter's name fits {pattern!r} (they are called "
                    f"{known}, ...): correct it, or leave it out"
                )

    def spares(self, name: str, grad: torch.Tensor) -> bool:
        """Return whether a parameter's gradient is to cross exactly."""
        return self.is_lossy and (grad.dim() <= 1 or self._is_named(name))

    def split(self, named: Iterable[Named], *, exact: bool) -> list[tuple[list[Named], bool]]:
        """Return groups of tensors in their order, and whether each crosses exactly."""
        named = list(named)
        if exact or not self.is_lossy:
            return [(named, exact)]
        groups: dict[bool, list[Named]] = {False: [], True: []}
        for each in named:
            groups[self.spares(*each)].append(each)
        return [(group, is_exact) for is_exact, group in groups.items() if group]

    def _is_named(self, name: str) -> bool:
        found = self._matches.get(name)
        if found is None:
            bare = bare_name(name)
            found = any(fnmatch.fnmatchcase(bare, pattern) for pattern in self._bare)
            self._matches[name] = found
        return found
