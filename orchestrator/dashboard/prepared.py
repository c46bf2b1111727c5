"""Answers that take long to make, made anew beside those who ask for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

DEAR_S = 0.05
"""An answer that takes less computing is made when it is asked for."""
OLD_S = 3.0
"""One that took more may be so old; pages ask each second."""
MAX_KEPT = 64

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Made:
    answer: Any
    version: object
    """What it was made from."""
    at_s: float
    cost_s: float


class PreparedAnswers:
    """Keeps the last answers. Any thread may ask; `close` waits for what is being made."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        spent_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Begin without answers.

        Args:
            now_s: The clock.
            spent_s: Time that this thread has computed: a busy machine makes no answer dear.
        """
        self._now_s, self._spent_s = now_s, spent_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[object, _Made] = OrderedDict()
        self._in_making: set[object] = set()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="answers")

    def close(self) -> None:
        """Make nothing more."""
        self._maker.shutdown(cancel_futures=True)

    def get(self, key: object, version: object, make: Callable[[], Answer]) -> Answer:
        """Return the answer of that name.

        It is of this version; or of an earlier one, while the next is being made, where that takes
        long.
        """
        with self._lock:
            made = self._kept.get(key)
            if made is not None:
                self._kept.move_to_end(key)
                answer: Answer = made.answer
                if made.version == version:
                    return answer
                if made.cost_s >= DEAR_S and self._now_s() - made.at_s < OLD_S:
                    if key not in self._in_making:
                        self._in_making.add(key)
                        self._maker.submit(self._prepare, key, version, make)
                    return answer
        return self._make(key, version, make)

    def _prepare(self, key: object, version: object, make: Callable[[], Answer]) -> None:
        try:
            self._make(key, version, make)
        except Exception:  # noqa: BLE001 - whoever asks next makes it, and is told
            with self._lock:
                self._kept.pop(key, None)
        finally:
            with self._lock:
                self._in_making.discard(key)

    def _make(self, key: object, version: object, make: Callable[[], Answer]) -> Answer:
        began_s = self._spent_s()
        answer = make()
        cost_s = self._spent_s() - began_s
        with self._lock:
            self._kept[key] = _Made(answer, version, self._now_s(), cost_s)
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return answer
