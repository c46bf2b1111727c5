"""What is measured, by name: keys of Metric.values on the wire and in metrics.jsonl.

All times are seconds, all sizes bytes.
"""

STEP = "step"
"""One optimizer step of one rank (shipped from each site's first rank)."""
FIRST_AVERAGE = "first_average"
"""A script without steps has averaged tensors for the first time, told by a site's first rank. No
values."""
EVALUATION = "evaluation"
"""Held-out loss, at a step."""
LINK = "link"
"""Totals of one directed link since the run began; labels `source`, `target`."""

TIMELINE = "timeline"
"""One step of a site's first rank, as times of the wall clock; only steps that are kept."""
BUCKET = "bucket"
"""One bucket of such a step, of the same rank, as times of the wall clock."""
FAULT = "fault"
"""A change to the emulated WAN, as it was made; labels `what`, `source`, `target` or `site`."""
EMULATED_LINK = "emulated_link"
"""The emulator's own totals of one directed link since it began; labels `source`, `target`."""
CHECKPOINT = "checkpoint"
"""One checkpoint that was written, told by the rank that publishes it."""
CHECKPOINT_FAILED = "checkpoint_failed"
"""A checkpoint that a rank could not write, at its step; label REASON. No values."""
CHECKPOINT_STAYS = "checkpoint_stays"
"""A checkpoint beyond those to keep that could not be removed; label REASON. No values."""
ENTRY = "entry"
"""A site that comes back has fetched the others' state, told by a gateway of it."""
ENTERED = "entered"
"""A site that came back takes part from the step after this one on, told by its first rank."""
TROUBLE = "trouble"
"""What a machine of a site has too little of, or has again; label REASON. No values."""
STEPPED_ALONE = "stepped_alone"
"""A site's first rank has taken an optimizer step, and its script has not averaged anything yet. No
values.
"""
DEVICE_DIFFERS = "device_differs"
"""A site's first rank computes on another device than the topology's accelerator. No values; label
FOUND.
"""
FOUND = "found"
STATE = "state"
"""A site's script has called `site.checkpoint`: the state can be given, and taken over. No values.
"""
STATE_FAILED = "state_failed"
"""A site could not write its state for others that come back, at a step; label REASON. No values.
"""
NON_FINITE = "non_finite"
"""A gradient of a step held a NaN or an infinity, as the first rank to see it tells: label REASON.

Label TENSOR names the parameter.
"""
PROBE = "probe"
"""What one gateway measured of one direction of a link; labels `source`, `target`."""
ALLREDUCE = "allreduce"
"""One repetition of `isthmus bench allreduce` at one rank, counted by `step` from 0; label
DIGEST."""
FEW = frozenset({CHECKPOINT, CHECKPOINT_FAILED, FIRST_AVERAGE, STATE})
"""Kinds that a run has few of, and whose loss would change what is said of it: none is dropped."""

# kind "step"
LOSS = "loss"
"""Mean training loss over the site's tokens, in nats a byte (or the user's own unit).

Of the global batch: the mean over sites, weighted by SITE_TOKENS.
"""
TOKENS = "tokens"
"""Tokens of the global batch."""
SITE_TOKENS = "site_tokens"
STEP_S = "step_s"
"""Wall time of the step; the four parts below add up to it."""
COMPUTE_S = "compute_s"
INTRA_S = "intra_s"
"""Collectives inside the site that the backward pass did not hide."""
EXPOSED_INTER_S = "exposed_inter_s"
"""Crossing the WAN, not hidden."""
WAIT_S = "wait_s"
"""Waiting for other sites that were later, not hidden."""
HIDDEN_INTER_S = "hidden_inter_s"
"""With the gateway while backward still computed: no part of the step."""
ENCODE_S = "encode_s"
"""CPU time of the rank's gateway for this rank's chunks: a cost, no part of the step."""
DECODE_S = "decode_s"
"""CPU time of the rank's gateway for decoding and summing this rank's chunks."""
INTER_S = "inter_s"
"""Time from the first chunk handed to the gateway to the last result, hidden or not."""
RAW_BYTES = "raw_bytes"
"""float32 bytes that this rank handed over."""
WIRE_BYTES = "wire_bytes"
"""Bytes that the rank's gateway sent for them."""
GRADIENT_HASH = "gradient_hash"
"""52 bits of a hash of the site's own gradient, of its beginning; 0: it tells nothing of the data,
as zeros do. Where the exchange is off there is none."""
ROUND = "round"
"""The last round in which the step's gradients crossed, from 0. Absent: they have not."""
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"

# kind "entry"
STATE_BYTES = "state_bytes"
FOLLOWED_STEPS = "followed_steps"
"""Steps that a returning site has taken by the others' results alone; kind "entered"."""
FETCH_S = "fetch_s"
"""From when the site was let in until it had the state."""
AGAIN = "again"
"""Pieces that were asked for again."""

# kind "timeline": wall-clock seconds since the epoch, on the rank's machine
BEGIN_S = "begin_s"
COMPUTED_S = "computed_s"
"""Backward had handed over its last bucket."""
END_S = "end_s"
"""The optimizer's step was done; so the next step begins here."""

# kind "bucket": also wall-clock seconds; RAW_BYTES, WIRE_BYTES, WAIT_S, ENCODE_S, DECODE_S as above
BUCKET_INDEX = "bucket"
"""A bucket's number from 0, in the order of submission; the first holds the model's last layers."""
SUBMITTED_S = "submitted_s"
"""Backward had computed it."""
POSTED_S = "posted_s"
"""The reduce-scatter inside the site was done, and the gateway had it."""
REDUCED_S = "reduced_s"
"""The gateway gave back the sum over all sites."""
FINISHED_S = "finished_s"
"""The all-gather inside the site was done: the gradient is in place."""

# kind "fault" (and what a `shape` sets: `bytes_per_s`, `delay_s`, `jitter_s`, `loss`)
AT_S = "at_s"
"""When the script has it, since the run became active."""

# kind "allreduce" (and RAW_BYTES: of the tensor; BEGIN_S, END_S: of the all-reduce)
GATEWAYS_CPU_S = "gateways_cpu_s"
"""CPU time that the site's gateways used meanwhile; of its first rank, 0 of the others."""
RANK_CPU_S = "rank_cpu_s"
"""CPU time that the rank's process used meanwhile."""
RELATIVE_ERROR = "relative_error"
"""The result's error, ‖x - mean‖ ÷ ‖mean‖. Only the last repetition of the first site's first rank
has it."""
DIGEST = "digest"
"""A label: hash of all bits of the result."""

# kind "non_finite"
AVERAGED = "averaged"
"""1: of the average over sites, and this rank's own gradient was finite; else 0."""
TENSOR = "tensor"
"""A label: the parameter's name."""

# kinds "checkpoint_failed", "checkpoint_stays", "state_failed" and "non_finite"
REASON = "reason"
"""A label: one line."""

# kind "evaluation"
HELD_OUT_LOSS = "held_out_loss"
UNIGRAM_ENTROPY = "unigram_entropy"
"""Entropy of the training text, in nats a byte: the loss of a model that counts bytes."""

# kind "link" (and RAW_BYTES: float32 bytes of the chunks that it carried)
SENT_BYTES = "sent_bytes"
"""Payload and headers of frames, acknowledged ones only."""
SENT_FRAMES = "sent_frames"
BUSY_S = "busy_s"
"""Time with at least one frame on the way."""
RTT_S = "rtt_s"
"""Smallest time from a frame's sending to its acknowledgement."""
THROUGHPUT_BYTES_PER_S = "throughput_bytes_per_s"
"""sent_bytes over busy_s."""
LIMITED_BYTES = "limited_bytes"
"""The part of sent_bytes that crossed while the link was the limit, and not a sender with nothing
to send."""
LIMITED_S = "limited_s"
"""Time in which the link was the limit: limited_bytes over limited_s is what it carries."""
IDLE_RTT_S = "idle_rtt_s"
"""Round trip of the idle link, lately: the median of the latest eight greetings."""

# kind "checkpoint"
CHECKPOINT_BYTES = "checkpoint_bytes"
"""Size of all its files, of all sites."""
WRITE_S = "write_s"
"""From the step's end until it was whole."""
STALL_S = "stall_s"
"""Time in it for which training waited at that rank."""

# kind "probe"
RTT_S_P50 = "rtt_s_p50"
RTT_S_P99 = "rtt_s_p99"
JITTER_S = "jitter_s"
"""The jitter of one direction, from the echoes: sites/gateway/probing/prober.py."""
BYTES_PER_S = "bytes_per_s"
"""Payload; with an underscore and the number of connections behind it, as `bytes_per_s_4`."""
SEGMENTS = "segments"
"""TCP segments that were sent while the link was far from full."""
LOST_SEGMENTS = "lost_segments"
"""How many of `segments` were sent again."""
