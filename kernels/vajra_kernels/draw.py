# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Sample one token per row from its logits in one launch: penalties, temperature, top-k, top-p, min-p and the draw.

Nothing is sorted. Top-k and top-p keep all tokens up to some distance from the largest logit. That distance, one of
2^31 float32 values, is found by counting: each pass over the row compares with 8 distances and reduces the candidates
to an eighth, so eleven passes determine it exactly.

Invariants:
    - A row's token depends only on the row's logits, parameters and history.
    - Logits are read, never written: each pass applies the penalties again, which costs less than writing them out.
    - A row with a NaN logit, or with an infinite largest logit, gives -1.
    - Tokens of equal logits are kept or dropped together.
    - The draw inverts the cumulative weights in token order, summed in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2
from vajra_kernels.operands import Column

_NUM_COLUMNS = tl.constexpr(len(Column))
_PIVOTS = tl.constexpr(8)
_FIRST_SHIFT = tl.constexpr(28)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def load_adjusted(
    logits_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    start: tl.tensor,
    num_seen: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the float32 logits [TILE] of the tokens from ``start`` on, with penalties applied; -inf beyond the
    vocabulary.
    """
    token = start + tl.arange(0, TILE)
    ok = token < VOCAB
    logit = tl.load(logits_ptr + token, mask=ok, other=float("-inf")).to(tl.float32)
    seen = tl.load(seen_ptr + token, mask=token < num_seen, other=0)
    count = (seen >> 1).to(tl.float32)
    scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)  # finite, since infinity - infinity is NaN
    is_finite = (logit == logit) & (tl.abs(logit) <= _LARGEST)
    lowered = frequency * count + tl.where(count > 0, presence, 0.0)
    return tl.where((seen != 0) & is_finite, scaled, logit) - lowered


@triton.jit
def kept_weights(
    logits: tl.tensor, largest: tl.tensor, scale: tl.tensor, limit: tl.tensor, COUNTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (bits of the distance from the largest logit, weight) for each of the adjusted logits.

    The bits of float32 distances, as int32, are in the same order as the distances. A weight is the token's probability
    divided by that of the most probable token, or 1 with COUNTS; it is 0 at distances beyond ``limit``.
    """
    distance = largest - logits
    bits = distance.to(tl.int32, bitcast=True)
    weight = tl.full(distance.shape, 1.0, tl.float32) if COUNTS else tl.exp2(distance * scale)
    return bits, tl.where(bits <= limit, weight, 0.0)


@triton.jit
def farthest_kept(
    logits_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    num_seen: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    limit: tl.tensor,
    target: tl.tensor,
    COUNTS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return, as bits, the largest distance d from the largest logit for which the tokens at distances below d have a
    total weight below ``target``.

    Tokens at distances beyond ``limit`` have weight 0. With COUNTS, ``target`` is a number of tokens; otherwise it is a
    fraction of the total weight of all tokens.
    """
    lane = tl.arange(0, _PIVOTS)
    farthest = limit * 0
    if not COUNTS:
        sums = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, VOCAB, TILE, num_stages=4):
            logits = load_adjusted(logits_ptr, seen_ptr, start, num_seen, repetition, frequency, presence, VOCAB, TILE)
            _, weight = kept_weights(logits, largest, scale, limit, COUNTS)
            sums += weight
        target = target * tl.sum(sums, 0)
    for digit in range(0, 11):
        shift = tl.maximum(_FIRST_SHIFT - 3 * digit, 0)
        pivot = farthest + (lane << shift)
        below = tl.zeros([_PIVOTS, TILE], tl.float32)
        for start in tl.range(0, VOCAB, TILE, num_stages=4):
            logits = load_adjusted(logits_ptr, seen_ptr, start, num_seen, repetition, frequency, presence, VOCAB, TILE)
            bits, weight = kept_weights(logits, largest, scale, limit, COUNTS)
            below += tl.where(bits[None, :] < pivot[:, None], weight[None, :], 0.0)
        num_held = tl.sum((tl.sum(below, 1) < target).to(tl.int32), 0)
        farthest += tl.maximum(num_held - 1, 0) << shift
    return farthest


@triton.jit
def find_largest(
    logits_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    num_seen: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (largest adjusted logit, first token that has it, True if the row cannot be sampled)."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    place = tl.zeros([TILE], tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, VOCAB, TILE, num_stages=4):
        logits = load_adjusted(logits_ptr, seen_ptr, start, num_seen, repetition, frequency, presence, VOCAB, TILE)
        is_nan = tl.where(logits == logits, is_nan, 1)
        is_better = logits > best
        place = tl.where(is_better, start + lane, place)
        best = tl.where(is_better, logits, best)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, place, VOCAB), 0)
    is_lost = (tl.max(is_nan, 0) > 0) | (tl.abs(largest) > _LARGEST)
    return largest, token, is_lost


@triton.jit
def sample_kernel(
    tokens_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    stride_logits_row: tl.tensor,
    stride_seen_row: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (num_rows,): tokens int64 [R] of logits [R, VOCAB] with dense rows; see ``sampling.sample_tokens``."""
    row = tl.program_id(0).to(tl.int64)
    parameters = parameters_ptr + row * _NUM_COLUMNS
    temperature = tl.load(parameters).to(tl.float32)
    top_p = tl.load(parameters + 1).to(tl.float32)
    min_p = tl.load(parameters + 2).to(tl.float32)
    top_k = tl.load(parameters + 3).to(tl.int32)
    repetition = tl.load(parameters + 4).to(tl.float32)
    frequency = tl.load(parameters + 5).to(tl.float32)
    presence = tl.load(parameters + 6).to(tl.float32)
    history = tl.load(parameters + 7).to(tl.int64)
    number = tl.load(parameters + 8)
    num_seen = tl.where(history >= 0, VOCAB, 0)
    logits_ptr += row * stride_logits_row
    seen_ptr += tl.maximum(history, 0) * stride_seen_row

    largest, token, is_lost = find_largest(logits_ptr, seen_ptr, num_seen, repetition, frequency, presence, VOCAB, TILE)
    if (temperature > 0.0) & (is_lost == 0):
        scale = tl.maximum(tl.div_rn(-1.4426950408889634, temperature), -_LARGEST)
        limit = tl.where(top_k > 0, _INFINITY_BITS, 0)
        if top_k < VOCAB:
            limit = farthest_kept(
                logits_ptr, seen_ptr, num_seen, repetition, frequency, presence, largest, scale, limit,
                top_k.to(tl.float32), True, VOCAB, TILE,
            )  # fmt: skip
        if top_p < 1.0:
            within = farthest_kept(
                logits_ptr, seen_ptr, num_seen, repetition, frequency, presence, largest, scale, limit,
                top_p, False, VOCAB, TILE,
            )  # fmt: skip
            limit = tl.minimum(limit, within)
        if min_p > 0.0:
            farthest = -tl.log(min_p) * temperature
            farthest = tl.where(farthest > 0.0, farthest, 0.0)  # 0.0 instead of -0.0, whose bits differ
            limit = tl.minimum(limit, farthest.to(tl.int32, bitcast=True))
        total = number * 0.0
        for start in tl.range(0, VOCAB, TILE, num_stages=4):
            logits = load_adjusted(logits_ptr, seen_ptr, start, num_seen, repetition, frequency, presence, VOCAB, TILE)
            _, weight = kept_weights(logits, largest, scale, limit, False)
            total += tl.sum(weight.to(tl.float64), 0)
        target = tl.minimum(number * total, total * (1.0 - 1e-12))
        begin = token * 0
        before = number * 0.0
        cumulated = number * 0.0
        for start in tl.range(0, VOCAB, TILE, num_stages=4):
            logits = load_adjusted(logits_ptr, seen_ptr, start, num_seen, repetition, frequency, presence, VOCAB, TILE)
            _, weight = kept_weights(logits, largest, scale, limit, False)
            cumulated += tl.sum(weight.to(tl.float64), 0)
            is_behind = cumulated <= target
            before = tl.where(is_behind, cumulated, before)
            begin = tl.where(is_behind, start + TILE, begin)
        logits = load_adjusted(logits_ptr, seen_ptr, begin, num_seen, repetition, frequency, presence, VOCAB, TILE)
        _, weight = kept_weights(logits, largest, scale, limit, False)
        reached = before + tl.cumsum(weight.to(tl.float64), 0) > target
        lane = tl.arange(0, TILE)
        first = tl.min(tl.where(reached & (weight > 0.0), lane, TILE), 0)
        last = tl.max(tl.where(weight > 0.0, lane, 0), 0)  # used if rounding keeps the tile's sum below the target
        token = begin + tl.where(first < TILE, first, last)
    tl.store(tokens_ptr + row, tl.where(is_lost, -1, token).to(tl.int64))


def sample_launch(tokens: torch.Tensor, logits: torch.Tensor, parameters: torch.Tensor, seen: torch.Tensor) -> Launch:
    """Return the launch that writes ``tokens`` int64 [R]; other arguments as for ``sampling.sample_tokens``."""
    num_rows, vocab_size = logits.shape
    tile = min(1024, next_power_of_2(vocab_size))
    arguments = {
        "tokens_ptr": tokens,
        "logits_ptr": logits,
        "seen_ptr": seen,
        "parameters_ptr": parameters,
        "stride_logits_row": logits.stride(0),
        "stride_seen_row": vocab_size,
    }
    constants = {"VOCAB": vocab_size, "TILE": tile}
    return Launch(sample_kernel, (num_rows, 1, 1), arguments, constants, TileConfig(1, tile, 8, 1))
