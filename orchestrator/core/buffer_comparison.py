"""Notices buffers that differ between sites: parameters are equal, and models are not."""

from __future__ import annotations

from collections.abc import Mapping

KEPT_STEPS = 8
"""Steps whose hashes are kept: a site that is further behind is not compared."""


class BufferComparison:
    """Finds the first buffer that two sites do not have alike. Pure."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[str, Mapping[str, float]]] = {}
        """Which site has reported first after a step, and the hashes of its buffers."""
        self.has_found = False

    def report(self, site: str, step: int, hashes: Mapping[str, float]) -> str:
        """Compare a site's buffers after a step with another's; say what differs, the first time.

        Of unlike layouts only buffers of the same name are compared.
        """
        if self.has_found:
            return ""
        first_site, first = self._steps.setdefault(step, (site, hashes))
        if len(self._steps) > KEPT_STEPS:
            del self._steps[min(self._steps)]
        for name, number in hashes.items():
            if first.get(name, number) != number:
                self.has_found = True
                one, other = sorted((first_site, site))
                return (
                    f"buffer {name} differs between sites {one} and {other} after step {step}, so "
                    "their models do: it moves by what each site counts for itself. Average that by "
                    "site.all_reduce in place of torch.distributed, or call "
                    "site.average_buffers(model)"
                )
        return ""
