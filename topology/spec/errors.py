"""Errors for mistakes in an operator's documents, found before a run starts."""

from dataclasses import dataclass

_EXCERPT_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, at its place in the text.

    `line` and `column` count from 1; 0 says that there is no place (a --set override).
    """

    source: str
    line: int
    column: int
    message: str
    path: str
    """The path in the document, as `links.0.rtt`; empty for the document itself."""
    excerpt: str = ""
    """The offending line of the text, without its line break."""
    is_warning: bool = False
    """Whether it is only a warning: reported, but the document is accepted."""

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        where = f"  [{self.path}]" if self.path else ""
        head = f"{place}: {'warning' if self.is_warning else 'error'}: {self.message}{where}"
        if not self.excerpt:
            return head
        excerpt, caret = self._window()
        return f"{head}\n{self.line:>7} | {excerpt}\n{' ' * 7} | {caret}"

    def _window(self) -> tuple[str, str]:
        """Return the printable part of the line, and a line with a caret below the column."""
        # A control character in a broken file must not reach the terminal.
        line = "".join(
            c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in self.excerpt
        )
        start = max(0, self.column - 1 - _EXCERPT_CHARACTERS // 2)
        start = start if len(line) > _EXCERPT_CHARACTERS else 0
        # A tab in the line is a tab before the caret, however wide the terminal draws it.
        indent = "".join("\t" if c == "\t" else " " for c in line[start : self.column - 1])
        return line[start : start + _EXCERPT_CHARACTERS], f"{indent}^"


class ConfigError(ValueError):
    """The operator's documents are wrong. Carries every problem, not only the first."""

    def __init__(self, problems: list[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem("isthmus", 0, 0, problems, "")]
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))
