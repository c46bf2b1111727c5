"""What goes wrong before a run starts: mistakes in what an operator wrote."""

from dataclasses import dataclass


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
    """Where in the document, as `links.0.rtt`; empty for the document itself."""
    excerpt: str = ""
    """The offending line of the text, without its line break."""

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        where = f"  [{self.path}]" if self.path else ""
        head = f"{place}: error: {self.message}{where}"
        if not self.excerpt:
            return head
        number = f"{self.line:>7} | "
        return f"{head}\n{number}{self.excerpt}\n{' ' * 7} | {' ' * (self.column - 1)}^"


class ConfigError(ValueError):
    """The operator's documents are wrong. Carries every problem, not only the first."""

    def __init__(self, problems: list[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem("isthmus", 0, 0, problems, "")]
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))
