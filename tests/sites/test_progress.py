"""A connection that gets nothing across is told from a slow one, and from a process that stood."""

from __future__ import annotations

from isthmus.sites.gateway.links.progress import Progress, Traffic

LEASE_S = 10.0
LOOK_S = 1.0


class Connection:
    """One that is looked at each second."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.progress = Progress(self.now_s, LEASE_S)
        self.taken_bytes = 0
        self.num_answers = 0

    def look(self, left_bytes: int, taken: int = 0, answers: int = 0, late_s: float = 0.0) -> float:
        self.now_s += LOOK_S + late_s
        self.taken_bytes += taken
        self.num_answers += answers
        traffic = Traffic(self.taken_bytes, left_bytes, 0)
        return self.progress.look(self.now_s, LOOK_S, traffic, self.num_answers)


def test_a_long_message_over_a_slow_link_is_progress() -> None:
    connection = Connection()
    assert max(connection.look(8 << 20, taken=10_000) for _ in range(100)) == 0


def test_what_was_taken_to_the_last_byte_and_is_not_answered_is_silence() -> None:
    """A proxy takes a frame, and each question after it."""
    connection = Connection()
    connection.look(1 << 20, taken=1000)
    silent_s = [connection.look(0, taken=(1 << 20 if at == 0 else 17)) for at in range(20)]
    assert silent_s == [float(at) for at in range(1, 21)]


def test_a_peer_that_takes_no_more_is_silent() -> None:
    connection = Connection()
    assert [connection.look(1 << 20) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_an_answer_is_progress() -> None:
    connection = Connection()
    assert [connection.look(0, answers=at % 2) for at in range(4)] == [1.0, 0.0, 1.0, 0.0]


def test_who_stood_still_gives_time_anew() -> None:
    connection = Connection()
    for _ in range(5):
        connection.look(0)
    assert connection.look(0, late_s=60.0) == 0.0
    assert connection.look(0) == 1.0


def test_once_nothing_is_wanted_time_begins_anew() -> None:
    connection = Connection()
    for _ in range(5):
        connection.look(0)
    connection.progress.begin_anew(connection.now_s)
    assert connection.look(0) == 1.0
