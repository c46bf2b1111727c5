"""The script of a real run: trains by one case of the suite. Arguments: CASE WAY."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Train, and write what was learnt into the site's folder of the run."""
    import isthmus
    from tests.conformance.registry import CASES
    from tests.conformance.world import World, learnt

    name, way = sys.argv[1:]
    torch.set_num_threads(1)
    site = isthmus.join()
    torch.manual_seed(site.global_rank)
    world = World(way, site.global_rank, site.global_world_size, site)
    torch.save(learnt(CASES[name].script(world)), site.run_folder / f"learnt-{site.global_rank}.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
