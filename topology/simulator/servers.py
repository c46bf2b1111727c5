"""Something that serves in the order of arrival: a codec, a collective, a processor. Pure.

Work arrives in pieces: from when on its first piece is there, and when its last one is. The server
begins with the first, and needs the time of a piece after the last one came. For work whose pieces
come at a constant pace, or in growing distances, as they do behind other such servers and behind
the maximum of several, this is exactly when they leave one by one: the departure of piece j is the
maximum over i <= j of a(i) + (j - i + 1) d, which is convex in i if the arrivals a are, so that an
end of the range has it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Server:
    """One server and its queue. Call it in the order of arrivals."""

    free_s: float = 0.0
    """From when on it can take new work."""
    busy_s: float = 0.0
    """That it has worked, in all."""

    def serve(
        self, first_s: float, last_s: float, work_s: float, piece_s: float
    ) -> tuple[float, float]:
        """Return when the first and the last piece are done.

        Args:
            first_s: when the first piece is there.
            last_s: when the last one is.
            work_s: for all pieces together.
            piece_s: for one of them.
        """
        begin_s = max(first_s, self.free_s)
        # A server that waits for pieces takes others' meanwhile: only its work keeps it.
        self.free_s = begin_s + work_s
        self.busy_s += work_s
        return begin_s + piece_s, max(self.free_s, last_s + piece_s)
