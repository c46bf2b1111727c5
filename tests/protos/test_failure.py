"""One failure, on its way from where it happened to the journal."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from isthmus.protos.errors import CorruptDataError, PeerLostError, failure_of
from isthmus.protos.failure import Failure, one_line

FAILURE = Failure(
    code="RANK_KILLED",
    message="rank 2 of site a was killed by SIGKILL",
    at_s=10.0,
    site="a",
    node=1,
    rank=2,
    exit_code=-9,
    log_path="/log",
    is_collateral=True,
)


def test_a_gateways_place_is_on_a_node() -> None:
    lost = replace(FAILURE, code="GATEWAY_EXITED", message="it broke", rank=-1, gateway=3)
    assert lost.reason == "site a, node 1, gateway 3: it broke"
    assert Failure.from_message(lost.to_message(10.0), 10.0) == lost
    assert Failure.from_message(FAILURE.to_message(10.0), 10.0).gateway == -1


def test_a_message_says_how_long_ago_it_was() -> None:
    message = FAILURE.to_message(12.5)
    assert (message.age_s, message.rank, message.exit_code, message.node) == (2.5, 2, -9, 1)
    assert Failure.from_message(message, 100.0) == replace(FAILURE, at_s=97.5)
    assert FAILURE.to_message(9.0).age_s == 0


def test_its_place_is_said_once() -> None:
    assert FAILURE.place == "site a, rank 2"
    assert FAILURE.reason == FAILURE.message
    elsewhere = replace(FAILURE, message="it broke", rank=-1)
    assert elsewhere.reason == "site a, node 1: it broke"


def test_errors_say_who_must_act() -> None:
    bug = failure_of(ValueError("a\nb"), "ash")
    assert (bug.code, bug.message, bug.site) == ("INTERNAL", "ValueError: a b", "ash")
    assert failure_of(PeerLostError("gone", "birch"), "ash").site == "birch"
    assert failure_of(CorruptDataError("damaged")).code == "CORRUPT_DATA"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_what_a_disk_refuses_is_no_bug_of_ours(number: int) -> None:
    refused = failure_of(OSError(number, os.strerror(number), "/state/tensors"), "ash")
    assert (refused.code, refused.site) == ("FILE_ERROR", "ash")
    assert refused.message == f"/state/tensors: {os.strerror(number)}"
    unnamed = failure_of(OSError(number, os.strerror(number)))
    assert (unnamed.code, unnamed.message) == ("FILE_ERROR", os.strerror(number))
    assert failure_of(OSError(errno.EINVAL, "Invalid argument")).code == "INTERNAL"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "Caught ValueError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n"
            + f'  File "{"deep/" * 200}worker.py", line 374, in _worker_loop\n    data = fetch()\n'
            + "           ^^^^^^^\n"
            + "ValueError: sample 9 of shard 3 is bad\n",
            "Caught ValueError in DataLoader worker process 0. ValueError: sample 9 of shard 3 is bad",
        ),
        (
            "\n\n-- Process 1 terminated with the following error:\n"
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
            "KeyError: 'tokens'\n\nDuring handling of the above exception, another exception occurred:"
            '\n\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n    raise\n'
            "OSError: shard.bin: cut short",
            "-- Process 1 terminated with the following error: KeyError: 'tokens' During handling of "
            "the above exception, another exception occurred: OSError: shard.bin: cut short",
        ),
        (
            "Traceback (most recent call last): of a text",
            "Traceback (most recent call last): of a text",
        ),
        ("two\n  lines", "two lines"),
    ],
)
def test_what_another_process_said_is_not_cut_off_behind_its_frames(text: str, line: str) -> None:
    assert one_line(text) == line
