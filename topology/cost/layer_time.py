"""How long one layer of a micro-batch takes on one rank, and what it says to others meanwhile.

Pure.

Legend: b sequences of s tokens (s/c with context parallelism), width h, a heads, t tensor ranks.

- Matrices: each multiplication by itself, with its shape as `t` leaves it (device.gemm_s); the
  backward pass has two of each. Scores and their sums are b a/t small ones. Fused attention
  computes the scores again in its backward pass: 2.5 times the forward pass instead of 2 (Dao et
  al.).
- Element-wise kernels: elements of size h a token that they read or write; counted from the kernels
  of a GPT layer as Megatron-LM fuses them. Norms, dropout and residual are whole at each tensor
  rank unless the sequence is cut (Korthikanti et al.); scores are s² a numbers a sequence.
- Tensor parallelism: two all-reduces of b s h elements a pass (Shoeybi et al.); with sequence
  parallelism as many reduce-scatters and all-gathers, which cost the same. With `overlap_tensor`
  they are cut into t pieces and go on beside the multiplications (Wang et al., ASPLOS'23), which
  they delay by the device's `contention` of their time.
- Context parallelism: keys and values go once round the ring, behind the attention (Liu et al.,
  "Ring Attention"); what the attention does not cover is exposed. The backward pass sends twice as
  much.
- Expert parallelism: two all-to-alls a pass of the tokens that are sent to experts (balanced).
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.cost.collectives import (
    Level,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    levels_of,
)
from topology.cost.degrees import Degrees
from topology.cost.device import Device, Interior
from topology.cost.workload import Workload

_FORWARD_WHOLE, _BACKWARD_WHOLE = 11.0, 17.0
"""Elements of size h that two norms and two bias-dropout-residuals move (masks count half)."""
_FORWARD_SCORES, _BACKWARD_SCORES = 4.5, 5.5
"""Elements of the scores that mask, softmax and dropout move."""
_LOSS_BYTES = 24
"""That the cross entropy moves for each logit: to float32, maximum, exponential, gradient."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One layer of one micro-batch."""

    forward_s: float
    backward_s: float
    """What is computed again included."""
    exchange_s: float = 0.0
    """Of both together, what collectives of tensor, context and expert groups take."""

    @property
    def total_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s

    def times(self, count: float) -> PassTimes:
        """Return the times of so many such layers."""
        return PassTimes(count * self.forward_s, count * self.backward_s, count * self.exchange_s)


@dataclass(frozen=True, slots=True)
class _Compute:
    """Seconds of one pass over one layer."""

    matrices_s: float
    core_s: float
    """Scores and their sums: the part that selective recomputation repeats."""


def layer_times(
    workload: Workload, degrees: Degrees, device: Device, interior: Interior
) -> PassTimes:
    """Return the times of one layer on one rank."""
    forward, backward = _forward(workload, degrees, device), _backward(workload, degrees, device)
    tensor_s = _tensor_s(workload, degrees, interior)
    once_s, ring_s = _expert_s(workload, degrees, interior), _ring_s(workload, degrees, interior)
    forward_exchange_s = once_s + device.beside_s(ring_s, forward.core_s)
    forward_exchange_s += _uncovered_s(tensor_s, forward.matrices_s, degrees, device)
    backward_exchange_s = once_s + device.beside_s(2 * ring_s, backward.core_s)
    backward_exchange_s += _uncovered_s(tensor_s, backward.matrices_s, degrees, device)
    forward_s = forward.matrices_s + forward.core_s + forward_exchange_s
    backward_s = backward.matrices_s + backward.core_s + backward_exchange_s
    launches = 2
    if degrees.recompute == "full":
        backward_s, launches = backward_s + forward_s, 3
        backward_exchange_s += forward_exchange_s
    elif degrees.recompute == "selective" and not degrees.fused_attention:
        backward_s += forward.core_s
    return PassTimes(
        max(forward_s, device.launch_s),
        max(backward_s, launches * device.launch_s),
        forward_exchange_s + backward_exchange_s,
    )


def head_times(workload: Workload, degrees: Degrees, device: Device) -> PassTimes:
    """Return the times of logits and loss on a rank of the last stage."""
    tokens, columns = _tokens(workload, degrees), workload.vocabulary / degrees.tensor
    logits_s = device.gemm_s(tokens, workload.hidden, columns, workload.parameter_bytes)
    loss_s = device.stream_s(_LOSS_BYTES * tokens * columns)
    return PassTimes(logits_s + loss_s / 2, 2 * logits_s + loss_s / 2)


def activation_bytes(workload: Workload, degrees: Degrees) -> float:
    """Return the bytes of one micro-batch between two layers: b s h elements."""
    return _tokens(workload, degrees) * workload.hidden * workload.parameter_bytes


def _tokens(workload: Workload, degrees: Degrees) -> float:
    return degrees.micro_batch * workload.sequence / degrees.context


def _forward(workload: Workload, degrees: Degrees, device: Device) -> _Compute:
    matrices_s, core_s = _gemms(workload, degrees, device)
    moved = _moved_elements(workload, degrees, _FORWARD_WHOLE, mlp=3 if workload.gated else 2)
    scores = _FORWARD_SCORES * _score_elements(workload, degrees)
    width = workload.parameter_bytes
    return _Compute(
        matrices_s + device.stream_s(moved * width), core_s + device.stream_s(scores * width)
    )


def _backward(workload: Workload, degrees: Degrees, device: Device) -> _Compute:
    matrices_s, core_s = _gemms(workload, degrees, device)
    moved = _moved_elements(workload, degrees, _BACKWARD_WHOLE, mlp=5 if workload.gated else 3)
    scores = _BACKWARD_SCORES * _score_elements(workload, degrees)
    width = workload.parameter_bytes
    again = 2.5 if degrees.fused_attention else 2.0
    return _Compute(
        2 * matrices_s + device.stream_s(moved * width),
        again * core_s + device.stream_s(scores * width),
    )


def _gemms(workload: Workload, degrees: Degrees, device: Device) -> tuple[float, float]:
    """Return the seconds of the matrices, and of scores and sums, of a forward pass."""
    tokens, hidden, tensor = _tokens(workload, degrees), workload.hidden, degrees.tensor
    width = workload.parameter_bytes
    matrices_s = device.gemm_s(tokens, hidden, (hidden + 2 * workload.kv_width) / tensor, width)
    matrices_s += device.gemm_s(tokens, hidden / tensor, hidden, width)
    local_experts = workload.experts / degrees.expert
    routed = tokens * workload.experts_per_token / local_experts  # to each of them, in balance
    up = (2 if workload.gated else 1) * workload.mlp_width / tensor
    mlp_s = device.gemm_s(routed, hidden, up, width)
    mlp_s += device.gemm_s(routed, workload.mlp_width / tensor, hidden, width)
    head, rows = hidden / workload.heads, workload.sequence / degrees.context
    if degrees.fused_attention:
        core_s = device.fused_attention_s(rows, workload.sequence, head)
    else:
        core_s = device.gemm_s(rows, head, workload.sequence, width)
        core_s += device.gemm_s(rows, workload.sequence, head, width)
    num_heads = degrees.micro_batch * workload.heads / tensor
    return matrices_s + local_experts * mlp_s, num_heads * core_s


def _moved_elements(workload: Workload, degrees: Degrees, whole: float, mlp: int) -> float:
    """Return the elements that element-wise kernels read and write, but for those of scores.

    Args:
        workload: the model.
        degrees: its cut.
        whole: elements of size h that are moved at every tensor rank.
        mlp: elements of the MLP's width that its activation moves.
    """
    tokens, tensor = _tokens(workload, degrees), degrees.tensor
    cut = tensor if degrees.sequence_parallel else 1
    heads = 2 * (workload.hidden + 2 * workload.kv_width)  # queries, keys and values, transposed
    activation = mlp * workload.experts_per_token * workload.mlp_width
    return tokens * (whole * workload.hidden / cut + (heads + activation) / tensor)


def _score_elements(workload: Workload, degrees: Degrees) -> float:
    if degrees.fused_attention:
        return 0.0
    return _tokens(workload, degrees) * workload.sequence * workload.heads / degrees.tensor


def _tensor_s(workload: Workload, degrees: Degrees, interior: Interior) -> float:
    """Return the seconds of a pass's collectives in the tensor group."""
    return 2 * all_reduce_s(
        _levels(degrees.tensor, 1, interior), activation_bytes(workload, degrees)
    )


def _uncovered_s(tensor_s: float, matrices_s: float, degrees: Degrees, device: Device) -> float:
    """Return what of a tensor group's collectives their multiplications do not cover.

    Overlapped, each is cut into t pieces, of which the first or the last has nothing to hide
    behind.
    """
    if not degrees.overlap_tensor:
        return tensor_s
    return max(tensor_s / degrees.tensor, device.beside_s(tensor_s, matrices_s))


def _ring_s(workload: Workload, degrees: Degrees, interior: Interior) -> float:
    """Return the seconds that keys and values need round the context group, once."""
    elements = 2 * degrees.micro_batch * workload.sequence * workload.kv_width
    pair_bytes = elements * workload.parameter_bytes / degrees.tensor
    return all_gather_s(_levels(degrees.context, degrees.tensor, interior), pair_bytes)


def _expert_s(workload: Workload, degrees: Degrees, interior: Interior) -> float:
    """Return the seconds of a pass's dispatch and combination of tokens."""
    cut = degrees.tensor if degrees.sequence_parallel else 1
    sent_bytes = activation_bytes(workload, degrees) * workload.experts_per_token / cut
    levels = _levels(degrees.expert, degrees.tensor * degrees.context, interior)
    return 2 * all_to_all_s(levels, sent_bytes)


def _levels(ranks: int, stride: int, interior: Interior) -> list[Level]:
    return levels_of(ranks, stride, interior.node_ranks, interior.node, interior.cluster)
