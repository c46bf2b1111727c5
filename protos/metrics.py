"""Names of metrics: keys of Metric.values on the wire and in metrics.jsonl.

All times are seconds, all sizes bytes.
"""

STEP = "step"
"""One optimizer step of one rank (shipped from each site's first rank)."""
FIRST_AVERAGE = "first_average"
"""A script without steps has averaged tensors for the first time; reported by a site's first rank.
No values."""
EVALUATION = "evaluation"
"""Held-out loss, at a step."""
LINK = "link"
"""Totals of one directed link since the run began; labels `source`, `target`."""

TIMELINE = "timeline"
"""One sampled step of a site's first rank, as wall-clock times."""
BUCKET = "bucket"
"""One bucket of a sampled step, at the same rank, as wall-clock times."""
FAULT = "fault"
"""A change to the emulated WAN, as it was made; labels `what`, `source`, `target` or `site`."""
EMULATED_LINK = "emulated_link"
"""The emulator's own totals of one directed link since it began; labels `source`, `target`."""
CHECKPOINT = "checkpoint"
"""One written checkpoint; reported by the rank that publishes it."""
CHECKPOINT_FAILED = "checkpoint_failed"
"""A checkpoint that a rank could not write, at its step; label REASON. No values."""
CHECKPOINT_STAYS = "checkpoint_stays"
"""A checkpoint beyond those to keep that could not be removed; label REASON. No values."""
ENTRY = "entry"
"""A rejoining site has fetched the others' state; reported by its gateway."""
ENTERED = "entered"
"""A site takes part again from the step after this one on; reported by its first rank."""
TROUBLE = "trouble"
"""A machine of a site runs short of disk space or memory, or has enough again; label REASON. No
values."""
STEPPED_ALONE = "stepped_alone"
"""A site's first rank has taken an optimizer step before its script averaged anything. No values.
"""
DEVICE_DIFFERS = "device_differs"
"""A site's first rank computes on another device than the topology's accelerator. No values; label
FOUND.
"""
FOUND = "found"
STATE = "state"
"""A site's script has called `site.checkpoint`, so state can be sent and received. No values.
"""
STATE_FAILED = "state_failed"
"""A site could not write its state for rejoining sites, at a step; label REASON. No values.
"""
NON_FINITE = "non_finite"
"""A gradient of a step held NaN or infinity; reported by the first rank to see it; label REASON.

Label TENSOR names the parameter.
"""
PROBE = "probe"
"""One gateway's measurement of one direction of a link; labels `source`, `target`."""
ALLREDUCE = "allreduce"
"""One repetition of `isthmus bench allreduce` at one rank, counted by `step` from 0; label
DIGEST."""
MODEL = "model"
"""What a script has synchronised, once it has taken a step with it; reported by a site's first
rank. Label DEVICE."""
FEW = frozenset({CHECKPOINT, CHECKPOINT_FAILED, FIRST_AVERAGE, MODEL, STATE})
"""Rare kinds that are never dropped, because a report on the run depends on them."""

# kind "step"
LOSS = "loss"
"""Mean training loss over the site's tokens, in nats per byte (or the user's own unit).

The loss of the global batch is the mean over sites weighted by SITE_TOKENS.
"""
TOKENS = "tokens"
"""Tokens of the global batch."""
SITE_TOKENS = "site_tokens"
STEP_S = "step_s"
"""Wall time of the step; the four parts below add up to it. Among the run's totals: the mean of the
last steps, at the slowest site."""
COMPUTE_S = "compute_s"
INTRA_S = "intra_s"
"""Time in collectives inside the site, not hidden by the backward pass."""
EXPOSED_INTER_S = "exposed_inter_s"
"""Time of crossing the WAN, not hidden."""
WAIT_S = "wait_s"
"""Time of waiting for slower sites, not hidden."""
HIDDEN_INTER_S = "hidden_inter_s"
"""Time of crossing the WAN during backward; adds nothing to the step."""
ENCODE_S = "encode_s"
"""CPU time of the rank's gateway for encoding this rank's chunks; no part of the step."""
DECODE_S = "decode_s"
"""CPU time of the rank's gateway for decoding and summing this rank's chunks."""
INTER_S = "inter_s"
"""Time from the first chunk handed to the gateway to the last result, hidden or not."""
RAW_BYTES = "raw_bytes"
"""float32 bytes that this rank submitted."""
WIRE_BYTES = "wire_bytes"
"""Bytes that the rank's gateway sent for its chunks."""
GRADIENT_HASH = "gradient_hash"
"""52 bits of a hash of the beginning of the site's own gradient; 0: it says nothing about the data
(zeros, say). Absent if the exchange is off."""
ROUND = "round"
"""Last round in which the step's gradients crossed, from 0. Absent: none did."""
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
SITE_GRADIENT_NORM = "site_gradient_norm"
"""2-norm of the site's own gradient, before it crosses; with the next, where the job asks for the
noise scale, of a step whose gradients crossed once."""
MEAN_GRADIENT_NORM = "mean_gradient_norm"
"""2-norm of the average over all sites."""
NOISE_SCALE = "noise_scale"
"""Gradient noise scale, in tokens: among the run's totals, orchestrator/core/noise_scale.py."""
MFU = "mfu"
"""Model FLOPs utilisation, 0 to 1. The coordinator adds it to a site's latest step and to the run's
totals, where it is known: orchestrator/core/model_flops.py."""
MFU_ESTIMATE = "mfu_estimate"
"""The same instead of it, where FLOPs a token are estimated as 6 a trainable parameter."""

# kind "model"
PARAMETERS = "parameters"
"""Number of trainable parameters, over all ranks of the site."""
COUNTS_TOKENS = "counts_tokens"
"""1: the script has called `site.count_tokens`, so SITE_TOKENS are its tokens; else 0."""
DEVICE = "device"
"""A label: the name of the device that the rank computes on."""

# kind "entry"
STATE_BYTES = "state_bytes"
FOLLOWED_STEPS = "followed_steps"
"""Steps that a rejoining site took with the others' results only; kind "entered"."""
FETCH_S = "fetch_s"
"""Time from the site's admission until it had the state."""
AGAIN = "again"
"""Number of pieces requested again."""

# kind "timeline": wall-clock seconds since the epoch, on the rank's machine
BEGIN_S = "begin_s"
COMPUTED_S = "computed_s"
"""Time at which backward submitted its last bucket."""
END_S = "end_s"
"""Time at which the optimizer's step ended and the next step begins."""

# kind "bucket": also wall-clock seconds; RAW_BYTES, WIRE_BYTES, WAIT_S, ENCODE_S, DECODE_S as above
BUCKET_INDEX = "bucket"
"""A bucket's number from 0, in the order of submission; the first holds the model's last layers."""
SUBMITTED_S = "submitted_s"
"""Time at which backward had computed the bucket."""
POSTED_S = "posted_s"
"""Time at which the reduce-scatter inside the site ended and the gateway got the bucket."""
REDUCED_S = "reduced_s"
"""Time at which the gateway returned the sum over all sites."""
FINISHED_S = "finished_s"
"""Time at which the all-gather inside the site ended and the gradient is in place."""

# kind "fault" (and what a `shape` sets: `bytes_per_s`, `delay_s`, `jitter_s`, `loss`)
AT_S = "at_s"
"""Scheduled time of the fault, since the run became active."""

# kind "allreduce" (and RAW_BYTES: of the tensor; BEGIN_S, END_S: of the all-reduce)
GATEWAYS_CPU_S = "gateways_cpu_s"
"""CPU time of the site's gateways meanwhile; reported by its first rank, 0 by others."""
RANK_CPU_S = "rank_cpu_s"
"""CPU time of the rank's process meanwhile."""
RELATIVE_ERROR = "relative_error"
"""Relative error of the result, ‖x - mean‖ ÷ ‖mean‖. Only in the last repetition of the first
site's first rank."""
DIGEST = "digest"
"""A label: hash of all bits of the result."""

# kind "non_finite"
AVERAGED = "averaged"
"""1: the average over sites is not finite, though this rank's own gradient was; else 0."""
TENSOR = "tensor"
"""A label: the parameter's name."""

# kinds "checkpoint_failed", "checkpoint_stays", "state_failed" and "non_finite"
REASON = "reason"
"""A label: one line."""

# kind "evaluation"
HELD_OUT_LOSS = "held_out_loss"
UNIGRAM_ENTROPY = "unigram_entropy"
"""Entropy of the training text, in nats per byte: the loss of a model that counts bytes."""

# kind "link" (and RAW_BYTES: float32 bytes of the chunks that it carried)
SENT_BYTES = "sent_bytes"
"""Payload and headers of acknowledged frames."""
SENT_FRAMES = "sent_frames"
BUSY_S = "busy_s"
"""Time with at least one frame in flight."""
RTT_S = "rtt_s"
"""Shortest time from a frame's sending to its acknowledgement."""
THROUGHPUT_BYTES_PER_S = "throughput_bytes_per_s"
"""sent_bytes over busy_s."""
LIMITED_BYTES = "limited_bytes"
"""The part of sent_bytes that crossed while the link, and not an idle sender, was the limit."""
LIMITED_S = "limited_s"
"""Time in which the link was the limit: limited_bytes / limited_s is its bandwidth."""
IDLE_RTT_S = "idle_rtt_s"
"""Recent round trip of the idle link: median of the latest eight greetings."""

# kind "checkpoint"
CHECKPOINT_BYTES = "checkpoint_bytes"
"""Size of the checkpoint's files of all sites."""
WRITE_S = "write_s"
"""Time from the step's end until the checkpoint was complete."""
STALL_S = "stall_s"
"""The part of that time for which training waited at that rank."""

# kind "probe"
RTT_S_P50 = "rtt_s_p50"
RTT_S_P99 = "rtt_s_p99"
JITTER_S = "jitter_s"
"""The jitter of one direction, from the echoes: sites/gateway/probing/prober.py."""
BYTES_PER_S = "bytes_per_s"
"""Payload rate; the number of connections is appended, as in `bytes_per_s_4`."""
SEGMENTS = "segments"
"""TCP segments sent while the link was far from full."""
LOST_SEGMENTS = "lost_segments"
"""Retransmissions among `segments`."""
