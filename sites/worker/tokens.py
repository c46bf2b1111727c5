"""How much data is behind this rank's next gradient: its weight in the average of all ranks."""

from protos.errors import LocalProtocolError


class TokenCount:
    """Adds up what the script counts until a backward pass takes it."""

    def __init__(self) -> None:
        self._counted: int | None = None
        self._ever_counted = False

    def add(self, tokens: int) -> None:
        """Count tokens of the current step.

        Raises:
            ValueError: a negative count.
        """
        if tokens < 0:
            raise ValueError(f"count_tokens: want >= 0, got {tokens}")
        self._counted = (self._counted or 0) + tokens
        self._ever_counted = True

    def take(self) -> float:
        """Return the step's tokens and start anew; 1 in a script that never counts.

        Raises:
            LocalProtocolError: the script counted before other steps, but not before this one.
        """
        if self._counted is None and self._ever_counted:
            raise LocalProtocolError(
                "count_tokens was called for earlier steps, but not before this backward pass: "
                "its gradient would weigh 1 token"
            )
        tokens = 1 if self._counted is None else self._counted
        self._counted = None
        return float(tokens)
