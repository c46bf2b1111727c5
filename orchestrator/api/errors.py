"""The error of what was asked of isthmus and cannot be done, with a code of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.errors import IsthmusError

Where = Mapping[str, Any] | list[Mapping[str, Any]] | None


class CommandError(IsthmusError):
    """A command cannot do what it was asked, or the run that it was about did not end well."""

    def __init__(
        self,
        code: str,
        message: str,
        where: Where = None,
        details: str = "",
        hint: str = "",
        brief: str = "",
    ) -> None:
        """Describe the error as both streams show it.

        Args:
            code: A key of protos/catalogue.py.
            message: One line.
            where: The place, for programs.
            details: For people, above the message: the lines with their carets, or how the command
                is used.
            hint: For people; empty: the catalogue's.
            brief: For people in place of the message, where the details say it already.
        """
        super().__init__(message)
        self.code = code
        self.where = where
        self.details = details
        self.hint = hint or CATALOGUE[code].hint
        self.brief = brief

    @property
    def exit_code(self) -> int:
        """The command's exit status."""
        return int(CATALOGUE[self.code].exit_code)
