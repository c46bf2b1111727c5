"""Train the job's model: what ranks run when the job names no script of its own.

Usage: isthmus launch JOB, or outside a run `torchrun --nproc-per-node N -m isthmus.sites.trainer`,
which trains one site with the default settings.
"""

import argparse

import isthmus
from isthmus.sites.trainer.train import train


def main() -> None:
    """Join the run, train, leave."""
    argparse.ArgumentParser(
        prog="python -m isthmus.sites.trainer", description=__doc__
    ).parse_args()
    site = isthmus.join(alone=True)
    train(site, site.run_folder)
    site.leave()


if __name__ == "__main__":
    main()
