"""A coordinator that answers operators from a script, over real gRPC on loopback."""

# ruff: noqa: N802 - gRPC fixes the method names

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from isthmus.protos.control.v1 import control_pb2, control_pb2_grpc


@dataclass
class ScriptedCoordinator(control_pb2_grpc.CoordinatorServicer):
    """What it will answer; and what it was asked."""

    runs: list[control_pb2.Run] = field(default_factory=list)
    """Newest first."""
    watched: list[control_pb2.Run] = field(default_factory=list)
    """What WatchRun streams."""
    lines: list[control_pb2.LogLine] = field(default_factory=list)
    events: list[control_pb2.Event] = field(default_factory=list)
    refuses_with: tuple[grpc.StatusCode, str] | None = None
    """Every call ends so."""
    breaks_stream_with: grpc.StatusCode | None = None
    """Streams end so after their last item."""
    holds_streams: bool = False
    """Streams stay open and silent after their last item, until their caller leaves."""
    before_end: Callable[[], None] | None = None
    """Called when a stream has sent its last item."""
    submitted: list[control_pb2.SubmitRequest] = field(default_factory=list)
    asked: list[object] = field(default_factory=list)

    def Session(
        self,
        request_iterator: Iterator[control_pb2.AgentMessage],
        context: grpc.ServicerContext,
    ) -> Iterator[control_pb2.CoordinatorMessage]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "for operators only")

    def ShipLogs(
        self, request: control_pb2.ShipLogsRequest, context: grpc.ServicerContext
    ) -> control_pb2.ShipLogsResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "for operators only")

    def Submit(
        self, request: control_pb2.SubmitRequest, context: grpc.ServicerContext
    ) -> control_pb2.SubmitResponse:
        self._refuse(context)
        self.submitted.append(request)
        if not any(run.run_id == request.run_id for run in self.runs):
            self.runs.insert(
                0, control_pb2.Run(run_id=request.run_id, state=control_pb2.RUN_STATE_FORMING)
            )
        return control_pb2.SubmitResponse(run_id=request.run_id)

    def GetRun(
        self, request: control_pb2.GetRunRequest, context: grpc.ServicerContext
    ) -> control_pb2.Run:
        self._refuse(context)
        return self._find(request.run_id, context)

    def ListRuns(
        self, request: control_pb2.ListRunsRequest, context: grpc.ServicerContext
    ) -> control_pb2.ListRunsResponse:
        self._refuse(context)
        return control_pb2.ListRunsResponse(runs=self.runs)

    def WatchRun(
        self, request: control_pb2.GetRunRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.Run]:
        self._refuse(context)
        run = self._find(request.run_id, context)
        for state in self.watched:
            yield control_pb2.Run.FromString(run.SerializeToString() + state.SerializeToString())
        self._end(context)

    def ReadLogs(
        self, request: control_pb2.ReadLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.LogLine]:
        self._refuse(context)
        self._find(request.run_id, context)
        self.asked.append(request)
        yield from self.lines
        self._end(context)

    def ReadEvents(
        self, request: control_pb2.ReadEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.Event]:
        self._refuse(context)
        self._find(request.run_id, context)
        self.asked.append(request)
        yield from self.events
        self._end(context)

    def CancelRun(
        self, request: control_pb2.CancelRunRequest, context: grpc.ServicerContext
    ) -> control_pb2.Run:
        self._refuse(context)
        run = self._find(request.run_id, context)
        if run.state == control_pb2.RUN_STATE_ACTIVE:
            run.state = control_pb2.RUN_STATE_STOPPING
        return run

    def DropSite(
        self, request: control_pb2.SiteRequest, context: grpc.ServicerContext
    ) -> control_pb2.Run:
        self._refuse(context)
        return self._find(request.run_id, context)

    AddSite = DropSite

    def MissingBlobs(
        self, request: control_pb2.BlobNames, context: grpc.ServicerContext
    ) -> control_pb2.BlobNames:
        return control_pb2.BlobNames()

    def PutBlobs(
        self, request_iterator: Iterator[control_pb2.BlobPart], context: grpc.ServicerContext
    ) -> control_pb2.PutBlobsResponse:
        list(request_iterator)
        return control_pb2.PutBlobsResponse()

    def GetBlobs(
        self, request: control_pb2.BlobNames, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.BlobPart]:
        self._refuse(context)
        yield from ()

    def OfferJoin(
        self, request: control_pb2.OfferJoinRequest, context: grpc.ServicerContext
    ) -> control_pb2.OfferJoinResponse:
        self._refuse(context)
        return control_pb2.OfferJoinResponse()

    def Join(
        self, request: control_pb2.JoinRequest, context: grpc.ServicerContext
    ) -> control_pb2.JoinResponse:
        self._refuse(context)
        return control_pb2.JoinResponse()

    def _find(self, run_id: str, context: grpc.ServicerContext) -> control_pb2.Run:
        for run in self.runs:
            if run_id in ("", run.run_id):
                return run
        return context.abort(grpc.StatusCode.NOT_FOUND, f"there is no run {run_id!r}")

    def _refuse(self, context: grpc.ServicerContext) -> None:
        if self.refuses_with is not None:
            context.abort(*self.refuses_with)

    def _end(self, context: grpc.ServicerContext) -> None:
        if self.before_end is not None:
            self.before_end()
        if self.holds_streams:
            left = _left(context)
            assert left(60.0), "the caller stayed for a minute"
        if self.breaks_stream_with is not None:
            context.abort(self.breaks_stream_with, "the stream broke")


def _left(context: grpc.ServicerContext) -> Callable[[float], bool]:
    """Return a wait for the end of the call."""
    left = threading.Event()
    if not context.add_callback(left.set):
        left.set()
    return left.wait


@contextmanager
def serving(coordinator: ScriptedCoordinator) -> Iterator[str]:
    """Serve on a free loopback port; give the address."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        control_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(10)
