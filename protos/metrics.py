"""What is measured, by name: keys of Metric.values on the wire and in metrics.jsonl.

All times are seconds, all sizes bytes.
"""

STEP = "step"
"""One optimizer step of one rank (shipped from each site's first rank)."""
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
ALLREDUCE = "allreduce"
"""One repetition of `isthmus bench allreduce` at one rank, counted by `step` from 0; label DIGEST."""

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
"""CPU time of the node's gateway for this rank's chunks: a cost, no part of the step."""
DECODE_S = "decode_s"
"""Likewise, for decoding and summing."""
INTER_S = "inter_s"
"""From the first chunk handed to the gateway to the last result, hidden or not."""
RAW_BYTES = "raw_bytes"
"""float32 bytes that this rank handed over."""
WIRE_BYTES = "wire_bytes"
"""Bytes that the node's gateway sent for them."""
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"

# kind "timeline": wall-clock seconds since the epoch, on the rank's machine
BEGIN_S = "begin_s"
COMPUTED_S = "computed_s"
"""Backward had handed over its last bucket."""
END_S = "end_s"
"""The optimizer's step was done; so the next step begins here."""

# kind "bucket": also wall-clock seconds; RAW_BYTES, WIRE_BYTES, WAIT_S, ENCODE_S, DECODE_S as above
BUCKET_INDEX = "bucket"
"""From 0, in the order of submission; the first holds the model's last layers."""
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
"""Likewise, of the rank's process."""
RELATIVE_ERROR = "relative_error"
"""Of the result, ‖x - mean‖ ÷ ‖mean‖; the last repetition of the first site's first rank has it."""
DIGEST = "digest"
"""A label: hash of all bits of the result."""

# kind "evaluation"
HELD_OUT_LOSS = "held_out_loss"
UNIGRAM_ENTROPY = "unigram_entropy"
"""Of the training text, in nats a byte: what a model that counts bytes would reach."""

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
