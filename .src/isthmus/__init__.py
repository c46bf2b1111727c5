"""Train one model in several data centers: what `import isthmus` gives scripts and notebooks.

A training script needs two lines of it:

    site = isthmus.join()
    site.attach(model, optimizer)

What launches it and looks at it, as commands do, is `isthmus.launch`, `isthmus.connect`,
`isthmus.plan` and `isthmus.Run`. Everything is imported with its first use: commands start without
torch, and scripts without what launches them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.orchestrator.api.run import Run, connect, launch, plan
    from isthmus.protos.errors import IsthmusError
    from isthmus.sites.worker.api.joining import join
    from isthmus.sites.worker.api.site import Site
    from isthmus.topology.spec.errors import ConfigError

    __version__: str

__all__ = [
    "ConfigError",
    "IsthmusError",
    "Run",
    "Site",
    "__version__",
    "connect",
    "join",
    "launch",
    "plan",
]

_SCRIPT = "isthmus.sites.worker.api.joining"
_CLIENT = "isthmus.orchestrator.api.run"
_MODULES = {
    "ConfigError": "isthmus.topology.spec.errors",
    "IsthmusError": "isthmus.protos.errors",
    "Run": _CLIENT,
    "Site": _SCRIPT,
    "connect": _CLIENT,
    "join": _SCRIPT,
    "launch": _CLIENT,
    "plan": _CLIENT,
}


def __getattr__(name: str) -> object:
    """Import what is asked for; of the worker library, once torch and the like are there."""
    if name == "__version__":
        from isthmus.protos.versions import build

        return build()
    if name not in _MODULES:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    if _MODULES[name] == _SCRIPT:
        from isthmus.protos.training_part import require_training_part

        require_training_part()
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List what there is, which is imported only once it is asked for."""
    return sorted([*globals(), *__all__])
