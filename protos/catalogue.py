"""Catalogue of all error codes, with message, remedy and exit status.

The codes appear in `--json` envelopes, in a run's `reason_code` and in docs/errors.md.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit statuses of commands."""

    words: str

    def __new__(cls, status: int, words: str) -> Self:
        """Make a status with its words."""
        code = int.__new__(cls, status)
        code._value_, code.words = status, words
        return code

    OK = 0, "ok"
    JOB_FAILED = 1, "the job failed"
    USAGE = 2, "usage or configuration"
    PREFLIGHT = 3, "preflight failed"
    UNREACHABLE = 4, "unreachable"
    TIMED_OUT = 5, "timed out"
    CANCELLED = 6, "cancelled"
    WITH_LOSSES = 7, "succeeded with losses"
    REFUSED = 8, "refused"
    NOT_MET = 9, "requirement not met"
    INTERNAL = 70, "a bug in isthmus"


@dataclass(frozen=True, slots=True)
class Entry:
    """One error code."""

    code: str
    message: str
    """General description; an error's own message has the details."""
    hint: str
    exit_code: ExitCode

    @property
    def page(self) -> str:
        """Address of the code's documentation."""
        return f"docs/errors.md#{self.code.lower().replace('_', '-')}"


_ENTRIES = (
    Entry("USAGE", "The command line is wrong.", "See --help.", ExitCode.USAGE),
    Entry(
        "INVALID_CONFIG",
        "A topology or job file has mistakes.",
        "Fix these lines, then run `isthmus validate`.",
        ExitCode.USAGE,
    ),
    Entry(
        "FILE_EXISTS",
        "A file would be overwritten.",
        "Choose another path, or pass --force.",
        ExitCode.REFUSED,
    ),
    Entry(
        "FILE_CHANGED",
        "A file changed while the command was running, so it was not written.",
        "Find out what changed it, then run the command again.",
        ExitCode.REFUSED,
    ),
    Entry(
        "FILE_ERROR",
        "A file or folder could not be read or written.",
        "Check that path, its permissions, and the free space.",
        ExitCode.REFUSED,
    ),
    Entry(
        "INSECURE_ADDRESS",
        "Without TLS, only loopback addresses may be used.",
        "Use addresses in 127.0.0.0/8 or ::1, or security: {mode: mtls}: docs/sites.md.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "UNSAFE_FILE",
        "A secret file can be read by others, or cannot be written.",
        "`chmod 600` it, or remove it so that a new one is made.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "BAD_CERTIFICATE",
        "A certificate or key cannot be used.",
        "Run `isthmus certs show`; then `isthmus certs renew`, or use other files.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "BAD_REVOCATION_LIST",
        "A list of revoked certificates cannot be used.",
        "`isthmus certs revoke` makes one where the authority's key is; take its ca.crl, and the "
        "ca.pem beside it, to the coordinator.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "UNAUTHENTICATED",
        "The caller did not authenticate.",
        "Be the user who started the coordinator, or name a copy of its secret in "
        "$ISTHMUS_TOKEN_FILE.",
        ExitCode.REFUSED,
    ),
    Entry(
        "PERMISSION_DENIED",
        "The caller is not allowed to do this.",
        "`isthmus certs show` prints the role in its certificate.",
        ExitCode.REFUSED,
    ),
    Entry(
        "PREFLIGHT_FAILED",
        "A run would fail on this machine.",
        "`isthmus doctor TOPOLOGY --job JOB` lists everything that needs fixing.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "CANNOT_TRAIN",
        "What ranks and gateways need is not installed on this machine, or is too old.",
        "There, with the Python that runs isthmus: `pip install 'isthmus[train]'`.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "STATE_LOCKED",
        "Another coordinator uses this state folder.",
        "Stop that coordinator, or pass another --state.",
        ExitCode.REFUSED,
    ),
    Entry(
        "RUN_UNREADABLE",
        "A run is still training at its sites, and this coordinator cannot lead it.",
        "Start it with the topology, the build and the folders that the run was launched with; or "
        "give the run up, which stops its sites: `isthmus coordinator --state DIR --abandon RUN`.",
        ExitCode.REFUSED,
    ),
    Entry(
        "ADDRESS_IN_USE",
        "Something else listens on this address.",
        "Stop it, or pass another --bind.",
        ExitCode.REFUSED,
    ),
    Entry(
        "COORDINATOR_UNREACHABLE",
        "No coordinator answers.",
        "Check the address, and that the coordinator is running.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "COORDINATOR_LOST",
        "The coordinator ended during the run.",
        "See its log. If `isthmus launch` started it: `isthmus launch JOB --resume`. Otherwise agents "
        "go on for a while: start it again with the same --state.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "RUN_NOT_FOUND",
        "There is no such run.",
        "`isthmus status --all` lists the runs.",
        ExitCode.USAGE,
    ),
    Entry(
        "REFUSED",
        "This cannot be done in the current state.",
        "See `isthmus status`.",
        ExitCode.REFUSED,
    ),
    Entry(
        "TIMED_OUT",
        "Timed out.",
        "Wait longer with --timeout, or see `isthmus status`.",
        ExitCode.TIMED_OUT,
    ),
    Entry(
        "CANCELLED",
        "The run was cancelled.",
        "Launch it again to continue.",
        ExitCode.CANCELLED,
    ),
    Entry(
        "WITH_LOSSES",
        "The run has succeeded with fewer sites than it began with, or without its last checkpoint.",
        "See `isthmus report`; to accept losses, set failure.allow_losses: true in the topology.",
        ExitCode.WITH_LOSSES,
    ),
    Entry(
        "START_TIMED_OUT",
        "Not every site was up within failure.start_within; all were rolled back.",
        "Check that site, or raise failure.start_within.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "SITE_LOST",
        "A site's agent went away or was silent for longer than failure.detect_within.",
        "Check that machine and the path to it.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "CONFIG_MISMATCH",
        "Two parts of the run do not have the same configuration or build.",
        "Give every site the same topology file and version of isthmus.",
        ExitCode.REFUSED,
    ),
    Entry(
        "STALE_GENERATION",
        "A message of a run or generation that has ended was refused.",
        "Nothing to do: its sender was left over from before.",
        ExitCode.REFUSED,
    ),
    Entry(
        "EMULATION_NOT_FOUND",
        "There is no such emulation, or it has ended.",
        "Start one with `isthmus emulate`; its first line says its name.",
        ExitCode.USAGE,
    ),
    Entry(
        "EMULATION_FAILED",
        "The WAN cannot be emulated here as asked.",
        "See the reason; `--emulator relay` works without privileges.",
        ExitCode.PREFLIGHT,
    ),
    Entry(
        "SCRIPT_FAILED",
        "A training script raised an exception, or ended with a status other than 0.",
        "Fix the script: its log ends with the traceback. To let the other sites continue "
        "without that site: failure.on_script_error: go_on.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NODE_FAULTY",
        "A training process ended for a fault of its machine: a device, its memory, or a disk.",
        "Test that machine (`isthmus doctor TOPOLOGY --burn-in 60s`), and mend or replace it. A site "
        "that stays out for it comes back by `isthmus sites add`: docs/failures.md.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "RANK_EXITED",
        "A training process ended for an outage of its machine, or of the network inside its site.",
        "Read its log, and check that machine.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "RANK_STALLED",
        "A training process hangs while others wait for it.",
        "The message says where; the file named has the stacks of all its threads. If it was only "
        "slow, raise failure.stall_within.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "RANK_KILLED",
        "A training process was killed by a signal.",
        "SIGKILL: out of memory, or someone's kill: see the machine's kernel log. Other signals: the "
        "message, and the end of the log named, say more.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NEVER_JOINED",
        "A training script ended without having joined the run.",
        "Add `site = isthmus.join()`, and `site.attach(model, optimizer)` before the first "
        "step: docs/integration.md.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NEVER_ATTACHED",
        "A training script joined the run, and averaged nothing with the other sites.",
        "Add `site.attach(model, optimizer)` before the first step. A script that averages "
        "nothing on purpose says `isthmus.join(averages=False)`: docs/integration.md.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "RANK_LOST",
        "A training process closed its connection to the gateway without leaving.",
        "See that rank's own end; its log says more.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "GATEWAY_EXITED",
        "A gateway process ended.",
        "Read its log.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NODE_LOST",
        "The supervisor of one of a site's machines ended, or fell silent.",
        "Check that machine, and the network between it and the site's first machine.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "LAUNCH_FAILED",
        "A site could not start its processes.",
        "Read its log.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "DATA_MISSING",
        "A job's data is missing at a site, or is not what the job describes.",
        "Copy it there, or correct path, url, digest and size under the job's `data`.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "PEER_LOST",
        "A gateway could not reach another site's gateway.",
        "Check that link.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "PARAMETERS_DIFFER",
        "The sites' parameters are no longer bit-identical.",
        "In the order of likelihood: the site named changes that parameter outside the optimizer, or "
        "its optimizer has other settings or skipped a step; it was frozen, thawed or put in place at "
        "one site only; an optimizer goes by the norm of a whole tensor (Muon, LAMB), and sites "
        "shard in unlike ways; last of all, the hardware.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "GRADIENTS_DIFFER",
        "A rank computes other gradients of a micro-batch than the others.",
        "Take the card, or the host, that is named out of service and test it. Then `isthmus launch "
        "--resume`, or `isthmus sites add` where the run has gone on: docs/failures.md.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "STEPS_DIFFER",
        "Sites take unlike optimizer steps for the same rounds.",
        "Have all ranks of all sites step after the same backward passes; who has no data for a step "
        "calls site.count_tokens(0) before its backward pass: docs/integration.md.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "SITE_ENDED_EARLY",
        "A site's script ended before the others'.",
        "Give all sites the same number of steps, or let the others continue: failure.on_early_end: go_on, and "
        "failure.min_sites.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "SAME_DATA",
        "Sites train on the same data.",
        "Divide the data by site.sampler(dataset), or by site.global_rank and "
        "site.global_world_size: torchrun's RANK and WORLD_SIZE count the ranks of one site. "
        "Where the same data is meant: "
        "`verify: {same_data: warn}` in the job.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "DATA_DIFFERS",
        "Ranks have made site.sampler for other data than others.",
        "Give all ranks of all sites the same dataset, global_batch and seed.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "LAYOUT_MISMATCH",
        "The sites' models or gradient buckets differ.",
        "Give every site the same script, arguments and version of torch.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NO_TOKENS",
        "No site had a token behind a gradient.",
        "Check the data loader: each step needs data at one site at least.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "STEP_WITHOUT_ROUND",
        "An optimizer stepped with gradients that have not crossed.",
        "Have the backward pass before each step go through the wrapped model, outside no_sync.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "ROUND_WITHOUT_STEP",
        "Parameters change from round to round, and no step is counted.",
        "Give site.attach the optimizer whose step() changes the parameters.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NOT_ATTACHED",
        "An optimizer stepped with gradients of parameters that do not cross.",
        "Wrap the model anew and call site.attach again, at the same step at all sites.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "NON_FINITE",
        "A gradient held a NaN or an infinity.",
        "See the loss of that site's steps before, and its data of that step; "
        "exchange.non_finite: carry lets them cross.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "CORRUPT_DATA",
        "A chunk's checksum did not match.",
        "Host memory or network hardware: check that site.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "SITE_NOT_STARTED",
        "The agent of a site could not be started there, or did not join.",
        "Fix each site listed, then run `isthmus up` again; what is running stays up.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "SITE_NOT_ENDED",
        "It is unknown whether a site's processes have ended.",
        "Check that machine; without a coordinator they end after failure.coordinator_within.",
        ExitCode.UNREACHABLE,
    ),
    Entry(
        "NOT_UP",
        "Nothing is running for this topology.",
        "`isthmus up TOPOLOGY` starts its coordinator and agents.",
        ExitCode.REFUSED,
    ),
    Entry(
        "NO_CHECKPOINT",
        "There is no valid checkpoint to resume from.",
        "`isthmus checkpoints list` shows all of them; without --resume the run starts over.",
        ExitCode.REFUSED,
    ),
    Entry(
        "BAD_CHECKPOINT",
        "A checkpoint is half written, cut short or changed.",
        "`isthmus launch JOB --resume RUN` takes the newest good one; `isthmus checkpoints list` "
        "shows all.",
        ExitCode.REFUSED,
    ),
    Entry(
        "BENCHMARK_INCOMPLETE",
        "A run of a benchmark failed, or made fewer steps than were to be measured.",
        "See the run named; --resume makes what is missing.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "REQUIREMENT_NOT_MET",
        "A benchmark has not reached what --require asks for.",
        "See the figures above; `isthmus report NAME` has them with their intervals.",
        ExitCode.NOT_MET,
    ),
    Entry(
        "PROTOCOL_VIOLATION",
        "A peer sent something that it may not send.",
        "Give every site the same version of isthmus.",
        ExitCode.JOB_FAILED,
    ),
    Entry(
        "INTERNAL",
        "isthmus has a bug.",
        "Please report it, with the traceback in the file named.",
        ExitCode.INTERNAL,
    ),
)

CATALOGUE = {entry.code: entry for entry in _ENTRIES}
"""All entries by code."""
