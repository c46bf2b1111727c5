"""Train one model in several data centers: what `import isthmus` gives a training script.

A script needs two lines of it:

    site = isthmus.join()
    site.attach(model, optimizer)

torch is imported with the first use of a name below, so that commands start without it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.sites.worker.api.joining import join
    from isthmus.sites.worker.api.site import Site

__all__ = ["Site", "join"]


def __getattr__(name: str) -> object:
    """Import the worker library when a script first asks for it."""
    if name not in __all__:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    from isthmus.protos.training_part import require_training_part

    require_training_part()
    from isthmus.sites.worker.api import joining

    return getattr(joining, name)


def __dir__() -> list[str]:
    """List what a script uses, which is imported only once it is asked for."""
    return sorted([*globals(), *__all__])
