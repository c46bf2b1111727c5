"""Which packets of a link are lost: drawn without replacement from shuffled decks.

Independent draws would be the obvious model, and the wrong one for a test bench: at p = 0.1 % the
number of losses in 10^5 packets then has a standard deviation of 10 %, so that one seed in three
shows a loss rate that is off by more than that. Here each deck of about 4/p packets holds exactly
4 losses, at positions drawn uniformly without replacement; p times the deck's size is seldom
whole, so its fraction is carried to the next deck. Any window of n packets therefore has p*n
losses, give or take 5, for every seed: 5 % at p = 0.1 % over 10^5 packets. Within a deck losses
are as irregular as can be, bursts of up to 4 included; what is missing are the longer lulls and
bursts of independent losses.
"""

from __future__ import annotations

import math
import random

LOSSES_PER_DECK = 4
MAX_DECK_PACKETS = 1 << 40
"""However small the probability is. No link carries that many."""


class LossDeck:
    """Says for each packet of a link in turn whether it is lost.

    Args:
        probability: Of a loss, 0 to 1.
        generator: The link's own, seeded.
    """

    def __init__(self, probability: float, generator: random.Random) -> None:
        self._probability = probability
        self._generator = generator
        self._carry = 0.0
        self._left = 0  # packets of the deck that have not been asked for
        self._positions: list[int] = []  # of its losses, counted from the deck's end, ascending

    def take(self, num_packets: int) -> list[int]:
        """Return which of the next `num_packets` are lost, by index, ascending."""
        if not self._probability:
            return []
        lost = []
        taken = 0
        while taken < num_packets:
            if not self._left:
                self._shuffle()
            step = min(self._left, num_packets - taken)
            rest = self._left - step
            while self._positions and self._positions[-1] >= rest:
                lost.append(taken + self._left - 1 - self._positions.pop())
            self._left = rest
            taken += step
        return lost

    def _shuffle(self) -> None:
        self._left = math.ceil(min(MAX_DECK_PACKETS, LOSSES_PER_DECK / self._probability))
        due = self._probability * self._left + self._carry
        # Rounding errors of the carry must never ask for more losses than there are packets.
        num_lost = min(self._left, math.floor(due + 1e-9))
        self._carry = due - num_lost
        self._positions = sorted(self._generator.sample(range(self._left), num_lost))
