"""The client of a coordinator: commands use it to submit, follow and cancel runs.

Its calls block, each with a deadline.

A stream has no deadline of its own, for a run may last weeks; but when nothing comes for SILENCE_S
the coordinator is asked whether it still answers, and that question has one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from isthmus.orchestrator.interruption import INTERRUPTION, LOOK_S
from isthmus.protos.control.v1 import control_pb2, control_pb2_grpc
from isthmus.protos.error_statuses import error_for
from isthmus.protos.errors import DeadlineExceededError, IsthmusError
from isthmus.protos.identities import COORDINATOR
from isthmus.protos.limits import CONTROL_CHANNEL_BYTES
from isthmus.protos.proxies import proxy_options
from isthmus.protos.security import control_security, explained, require_protected
from isthmus.topology.spec.errors import ConfigError, Problem

CALL_S = 10.0
DECIDE_S = 60.0
"""And so long a coordinator may take to decide a run: with many sites, on a busy machine."""
"""A coordinator answers within milliseconds; a stopped one never does."""
SILENCE_S = 10.0
BUFFERED_MESSAGES = 256
"""Messages of a stream that wait for whoever prints; beyond these the coordinator waits."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", CONTROL_CHANNEL_BYTES),
    ("grpc.max_send_message_length", CONTROL_CHANNEL_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.enable_retries", 0),
)

Message = TypeVar("Message")
Request = TypeVar("Request")
Answer_co = TypeVar("Answer_co", covariant=True)


class _Call(Protocol[Answer_co]):
    """A streaming call that goes on."""

    def __iter__(self) -> Iterator[Answer_co]:
        """Yield its answers."""

    def cancel(self) -> object:
        """End it."""


class CoordinatorUnreachableError(IsthmusError):
    """No coordinator answers at `address`."""

    code = "COORDINATOR_UNREACHABLE"
    retryable = True

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(f"no coordinator answers at {address}: {detail}")
        self.address = address


class Client:
    """A connection to one coordinator. A context manager: leaving it ends every call."""

    def __init__(
        self, address: str, *, call_s: float = CALL_S, silence_s: float = SILENCE_S
    ) -> None:
        require_protected(address.rpartition(":")[0])
        self.address = address
        self._call_s = call_s
        self._silence_s = silence_s
        self._channel = control_security().channel(
            address, [*OPTIONS, *proxy_options()], COORDINATOR
        )
        self._stub = control_pb2_grpc.CoordinatorStub(self._channel)
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._resources.enter_context(INTERRUPTION.holding())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        self._resources.close()

    def submit(
        self,
        run_id: str,
        job: control_pb2.Document,
        topology: control_pb2.Document,
        decisions: str = "",
        priority: int = 0,
        passed_env: Mapping[str, str] | None = None,
        code: control_pb2.Code | None = None,
    ) -> control_pb2.SubmitResponse:
        """Submit a run; the same id again answers the same run.

        A signal does not end the wait for the answer: nobody would know whether the run goes on.
        `decisions` are those of a plan for the job, as JSON; empty: there is no plan. Of runs that
        wait for the same sites, the one of the highest `priority` begins first. `passed_env` has
        the values of the job's `pass_env`, and `code` says what its files are.

        Raises:
            ConfigError: the coordinator found mistakes in the documents.
            IsthmusError: it refused, or does not answer.
        """
        request = control_pb2.SubmitRequest(
            run_id=run_id,
            job=job,
            topology=topology,
            decisions=decisions,
            priority=priority,
            passed_env=passed_env or {},
            code=code,
        )
        with self._mapped(invalid=lambda detail: ConfigError([_told(detail)])):
            return self._stub.Submit(request, timeout=self._call_s + DECIDE_S)

    def missing_blobs(self, digests: Iterable[str]) -> list[str]:
        """Return the digests whose contents the coordinator does not have."""
        request = control_pb2.BlobNames(digests=map(bytes.fromhex, digests))
        return [name.hex() for name in self._ask(self._stub.MissingBlobs, request).digests]

    def put_blobs(self, parts: Iterator[control_pb2.BlobPart]) -> None:
        """Give the coordinator contents, in parts, as fast as it takes them.

        Raises:
            IsthmusError: it refused one, or the connection broke; what came as a whole stays.
        """
        with self._mapped():
            call = self._stub.PutBlobs.future(parts)
            try:
                while True:
                    INTERRUPTION.check()
                    with suppress(grpc.FutureTimeoutError):
                        call.result(timeout=LOOK_S)
                        return
            finally:
                call.cancel()

    def offer_join(self, request: control_pb2.OfferJoinRequest) -> None:
        """Have the coordinator keep what a join token is good for."""
        self._ask(self._stub.OfferJoin, request)

    def get_run(self, run_id: str) -> control_pb2.Run:
        """Return a run as it is now; an empty id is the latest."""
        return self._ask(self._stub.GetRun, control_pb2.GetRunRequest(run_id=run_id))

    def list_runs(self) -> list[control_pb2.Run]:
        """Return all runs that the coordinator knows, newest first."""
        return list(self._ask(self._stub.ListRuns, control_pb2.ListRunsRequest()).runs)

    def cancel_run(self, run_id: str) -> control_pb2.Run:
        """Ask for the end of a run, whatever signals come; a run that has ended stays as it is."""
        with self._mapped():
            request = control_pb2.CancelRunRequest(run_id=run_id)
            return self._stub.CancelRun(request, timeout=self._call_s)

    def drop_site(self, run_id: str, site: str) -> control_pb2.Run:
        """Have a run go on without a site."""
        request = control_pb2.SiteRequest(run_id=run_id, site=site)
        return self._ask(self._stub.DropSite, request)

    def add_site(self, run_id: str, site: str) -> control_pb2.Run:
        """Have a site take part in a run again."""
        request = control_pb2.SiteRequest(run_id=run_id, site=site)
        return self._ask(self._stub.AddSite, request)

    def watch_run(self, run_id: str, deadline_s: float | None = None) -> Iterator[control_pb2.Run]:
        """Yield a run now, at each change and each second, until it has ended.

        Raises:
            DeadlineExceededError: it has not when the monotonic clock shows `deadline_s`.
        """
        request = control_pb2.GetRunRequest(run_id=run_id)
        yield from self._stream([self._stub.WatchRun(request)], run_id, deadline_s)

    def watch_run_with_logs(
        self, run_id: str, *, site: str, rank: int, deadline_s: float | None
    ) -> Iterator[control_pb2.Run | control_pb2.LogLine]:
        """Yield a run as `watch_run` does, and between them what one rank prints.

        Raises:
            DeadlineExceededError: as `watch_run`.
        """
        calls: list[_Call[control_pb2.Run | control_pb2.LogLine]] = [
            self._stub.WatchRun(control_pb2.GetRunRequest(run_id=run_id)),
            self._stub.ReadLogs(
                control_pb2.ReadLogsRequest(run_id=run_id, follow=True, site=site, rank=rank)
            ),
        ]
        yield from self._stream(calls, run_id, deadline_s)

    def read_logs(
        self, run_id: str, *, follow: bool, site: str, rank: int, tail: int
    ) -> Iterator[control_pb2.LogLine]:
        """Yield log lines; with `follow` until the run has ended. `rank` -1 and `tail` 0: all."""
        request = control_pb2.ReadLogsRequest(
            run_id=run_id, follow=follow, site=site, rank=rank, tail=tail
        )
        yield from self._stream([self._stub.ReadLogs(request)], run_id)

    def read_events(
        self, run_id: str, *, follow: bool, after: int = 0
    ) -> Iterator[control_pb2.Event]:
        """Yield events with a sequence above `after`; with `follow` until the run has ended."""
        request = control_pb2.ReadEventsRequest(run_id=run_id, follow=follow, after=after)
        yield from self._stream([self._stub.ReadEvents(request)], run_id)

    def _stream(
        self,
        calls: Sequence[_Call[Message]],
        run_id: str,
        deadline_s: float | None = None,
    ) -> Iterator[Message]:
        """Yield what streaming calls answer, until all have ended.

        After a silence, check that somebody is there.
        """
        items: queue.Queue[Message | grpc.RpcError | None] = queue.Queue(BUFFERED_MESSAGES)
        abandoned = threading.Event()
        readers = [
            threading.Thread(
                target=_pump, args=(call, items, abandoned), name="stream-reader", daemon=True
            )
            for call in calls
        ]
        for reader in readers:
            reader.start()
        num_open = len(calls)
        try:
            while num_open:
                wait_s = self._silence_s
                if deadline_s is not None:
                    wait_s = min(wait_s, deadline_s - time.monotonic())
                    if wait_s <= 0:
                        raise DeadlineExceededError(f"{run_id or 'the run'} has not ended in time")
                try:
                    item = INTERRUPTION.next_of(items, wait_s)
                except queue.Empty:
                    if wait_s == self._silence_s:
                        self.get_run(run_id)
                    continue
                if item is None:
                    num_open -= 1
                    continue
                if isinstance(item, grpc.RpcError):
                    with self._mapped():
                        raise item
                yield item
        finally:
            abandoned.set()
            for call in calls:
                call.cancel()
            for reader in readers:
                reader.join(self._call_s)

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[Request, Message], request: Request
    ) -> Message:
        """Return what a call answers; a signal ends the wait for it."""
        with self._mapped():
            call = method.future(request, timeout=self._call_s)  # it ends by then
            try:
                while True:
                    INTERRUPTION.check()
                    with suppress(grpc.FutureTimeoutError):
                        return call.result(timeout=LOOK_S)
            finally:
                call.cancel()

    @contextmanager
    def _mapped(self, invalid: Callable[[str], Exception] | None = None) -> Iterator[None]:
        """Turn a status into the error that it stands for; `invalid` makes INVALID_ARGUMENT's."""
        try:
            yield
        except grpc.RpcError as error:
            status, detail = _status(error)
            if status == grpc.StatusCode.UNAVAILABLE:
                told = explained(detail)
                why = "no connection" if told == detail else told
                raise CoordinatorUnreachableError(self.address, why) from error
            if status == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise CoordinatorUnreachableError(
                    self.address, f"silent for {self._call_s:g} s"
                ) from error
            if status == grpc.StatusCode.CANCELLED:  # what we cancel, nobody waits for
                raise CoordinatorUnreachableError(self.address, "it stopped serving") from error
            if status == grpc.StatusCode.INVALID_ARGUMENT and invalid is not None:
                raise invalid(detail) from error
            raise error_for(status, detail) from error


def _status(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Return a failed call's status and one line; every RpcError of a call is a Call too."""
    assert isinstance(error, grpc.Call)
    return error.code(), error.details() or ""


def _told(detail: str) -> Problem:
    return Problem("coordinator", 0, 0, detail, "")


def _pump(
    call: Iterable[Message],
    items: queue.Queue[Message | grpc.RpcError | None],
    abandoned: threading.Event,
) -> None:
    """Move a stream's messages, then its error or None, into `items` until it is abandoned."""
    end: grpc.RpcError | None = None
    try:
        for message in call:
            if not _put(items, message, abandoned):
                return
    except grpc.RpcError as error:
        end = error
    _put(items, end, abandoned)


def _put(
    items: queue.Queue[Message | grpc.RpcError | None],
    item: Message | grpc.RpcError | None,
    abandoned: threading.Event,
) -> bool:
    """Wait for room; False when nobody reads any more."""
    while not abandoned.is_set():
        try:
            items.put(item, timeout=1.0)
        except queue.Full:
            continue
        return True
    return False
