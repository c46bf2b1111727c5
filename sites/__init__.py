"""What runs inside one data center: agent, launcher, gateway, worker library, trainer.

A training script needs two lines of it:

    site = sites.join()
    site.synchronize(model, optimizer)

torch is imported with the first use of a name below, so that everything else here starts without
it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sites.worker.joining import join
    from sites.worker.site import Site

__all__ = ["Site", "join"]


def __getattr__(name: str) -> object:
    """Import the worker library when a script first asks for it."""
    if name not in __all__:
        raise AttributeError(f"module 'sites' has no attribute {name!r}")
    from protos.training_part import require_training_part

    require_training_part()
    from sites.worker import joining

    return getattr(joining, name)
