"""Failures of a site, in whole sentences and with their place. Pure."""

from __future__ import annotations

import dataclasses

from isthmus.protos.failure import Failure, name_exit, one_line
from isthmus.sites.node.rank_failures import COLLATERAL_EXIT_CODE


class SiteError(Exception):
    """A stage of a run failed at a site; `code` is a key of protos/catalogue.py."""

    def __init__(
        self, code: str, message: str, *, node: int = -1, gateway: int = -1, log_path: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.failure = Failure(
            code=code, message=message, node=node, gateway=gateway, log_path=log_path
        )


def rank_failure(failure: Failure, site: str, node: int) -> Failure:
    """Return a launcher's report of a rank with its place, in a whole sentence."""
    gave_up = failure.exit_code == COLLATERAL_EXIT_CODE and failure.is_collateral
    said = f": {failure.message}" if failure.message else ""
    end = f"gave up{said}" if gave_up else describe_end(failure.exit_code, failure.message)
    message = f"rank {failure.rank} of site {site} {end}"
    return dataclasses.replace(failure, message=one_line(message), site=site, node=node)


def describe_end(exit_code: int, why: str = "") -> str:
    """Return a phrase for how a process ended, and why if that is known."""
    how = "exited with" if exit_code >= 0 else "was killed by"
    return f"{how} {name_exit(exit_code)}" + (f": {why}" if why else "")
