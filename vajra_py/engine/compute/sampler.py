"""Sample a token from each row's logits.

Invariants:
    - A row whose logits have no finite maximum (NaN among them, overflow, nothing left to choose) gives `NO_TOKEN`, and
      changes nothing of any other row.
    - A token depends on its row's logits, its request's parameters, seed and number of tokens so far; not on other rows.
      Each draw uses one number, made from (seed, number of output tokens) by a counter-based generator on the host, so it
      is the same on every device and after a preemption.
    - Truncation keeps or drops tokens of equal probability together, so that no order of sorting shows.
    - Nothing waits for the device, except log-probabilities.
    - An exception leaves the state of every row as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vajra_py.engine.compute.batch import Ints
from vajra_py.engine.compute.interface import NewRow, SamplingParams, TokenLogprobs, needs_history
from vajra_py.engine.compute.penalties import History, apply_penalties
from vajra_py.engine.compute.transfer import to_device

_NEG_INF = float("-inf")
NO_TOKEN = -1
"""In the place of a token of a row that cannot be sampled."""
LOST_ROW = "its logits are not finite numbers, so that no token can be sampled"
"""What is said of such a row."""


@dataclass(slots=True)
class RowState:
    """What the sampler keeps of one slot."""

    sampling: SamplingParams
    ending_tokens: torch.Tensor | None
    """int64 ids that are not sampled before `min_tokens`, where that is asked for."""
    history: History | None


class Sampler:
    """Samples batches of rows by slot."""

    __slots__ = ("_device", "_eos", "_floats", "_greedy", "_is_plain", "_min_tokens", "_num_outputs", "_rows", "_seeds",
                 "_top_k", "_vocab_size")  # fmt: skip

    def __init__(
        self, max_requests: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._rows: list[RowState | None] = [None] * max_requests
        self._is_plain = np.ones(max_requests, bool)
        self._greedy = np.ones(max_requests, bool)
        self._floats = np.zeros((max_requests, 3), np.float32)  # temperature, top-p, min-p
        self._top_k = np.zeros(max_requests, np.int64)
        self._seeds = np.zeros(max_requests, np.uint64)
        self._num_outputs: Ints = np.zeros(max_requests, np.int64)
        self._min_tokens: Ints = np.zeros(max_requests, np.int64)

    def add(self, new: NewRow) -> None:
        """A request takes a slot."""
        sampling, slot = new.sampling, new.slot
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._eos))
        state = RowState(sampling, None, None)
        if sampling.min_tokens and ending:
            state.ending_tokens = to_device(np.array(sorted(ending), np.int64), self._device)
        if needs_history(sampling):
            state.history = History(new.prompt_token_ids, new.output_token_ids, self._vocab_size, self._device)
        self._rows[slot] = state
        self._greedy[slot] = sampling.temperature == 0.0
        self._is_plain[slot] = (
            sampling.temperature == 0.0
            and state.history is None
            and state.ending_tokens is None
            and sampling.logprobs is None
        )
        self._floats[slot] = (sampling.temperature or 1.0, sampling.top_p, sampling.min_p)
        self._top_k[slot] = min(sampling.top_k or self._vocab_size, self._vocab_size)
        self._seeds[slot] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._num_outputs[slot] = new.num_output_tokens
        self._min_tokens[slot] = sampling.min_tokens

    def remove(self, slot: int) -> None:
        """The request left."""
        self._rows[slot] = None
        self._is_plain[slot] = True

    def undo(self, slots: Sequence[int]) -> None:
        """Take back one token of each of these slots, which keep no history."""
        self._num_outputs[list(slots)] -= 1

    def sample(
        self, logits: torch.Tensor, slots: Ints, likeliest: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[int, TokenLogprobs]]:
        """Tokens int64 [R] of logits [R, vocab] for these slots, and log-probabilities for those that asked.

        `likeliest` is `likeliest_tokens(logits)` where that is known; it is the very tensor that is returned when nobody asks for
        more.
        """
        plain = bool(self._is_plain[slots].all())
        if plain:
            tokens = likeliest_tokens(logits) if likeliest is None else likeliest
            self._num_outputs[slots] += 1
            return tokens, {}
        raw = logits.float()
        adjusted = self._adjust(raw, slots)
        greedy = self._greedy[slots]
        tokens = likeliest_tokens(adjusted)
        if not greedy.all():
            drawn = np.flatnonzero(~greedy)
            index = to_device(drawn, self._device)
            lost = tokens[index] == NO_TOKEN
            tokens[index] = self._draw(adjusted[index], slots[drawn]).masked_fill_(lost, NO_TOKEN)
        real = tokens.clamp_min(0)
        logprobs = self._logprobs(raw, real, slots)
        self._num_outputs[slots] += 1
        self._remember(real, slots)
        return tokens, logprobs

    def _adjust(self, raw: torch.Tensor, slots: Ints) -> torch.Tensor:
        """Logits after penalties and without tokens that would end a request too early; `raw` stays as it is."""
        adjusted = raw
        rows = [(place, self._rows[slot]) for place, slot in enumerate(slots.tolist())]
        penalised = [(place, row.sampling, row.history) for place, row in rows if row is not None and row.history]
        if penalised:
            adjusted = apply_penalties(adjusted.clone(), penalised)
        early = self._num_outputs[slots] < self._min_tokens[slots]
        for place in np.flatnonzero(early).tolist():
            row = rows[place][1]
            if row is not None and row.ending_tokens is not None:
                adjusted = adjusted.clone() if adjusted is raw else adjusted
                adjusted[place, row.ending_tokens] = _NEG_INF
        return adjusted

    def _draw(self, logits: torch.Tensor, slots: Ints) -> torch.Tensor:
        """One token a row, by the inverse of the cumulated probabilities of the tokens that are kept."""
        floats = to_device(self._floats[slots], self._device)
        # From the largest down, so that no temperature overflows.
        scores = (logits - logits.amax(-1, keepdim=True)) / floats[:, :1]
        scores = _truncate(scores, floats, self._floats[slots], self._top_k[slots])
        cumulated = torch.softmax(scores, -1).double().cumsum_(-1)
        numbers = to_device(uniform_numbers(self._seeds[slots], self._num_outputs[slots]), self._device)
        # `right` skips tokens of probability 0; scaling by the last entry keeps rounding from running past the end.
        targets = (numbers.unsqueeze(-1) * cumulated[:, -1:]).minimum(cumulated[:, -1:] * (1.0 - 1e-12))
        return torch.searchsorted(cumulated, targets, right=True).squeeze(-1).clamp_max_(self._vocab_size - 1)

    def _remember(self, tokens: torch.Tensor, slots: Ints) -> None:
        for place, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            if row is not None and row.history is not None:
                row.history.add(tokens[place])

    def score(self, logits: torch.Tensor, tokens: Sequence[int], slot: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens [N] under logits [N, vocab], as the slot's `prompt_logprobs` asks for them."""
        row = self._rows[slot]
        count = 0 if row is None or row.sampling.prompt_logprobs is None else row.sampling.prompt_logprobs
        chosen = to_device(np.array(tokens, np.int64), logits.device)
        return _token_logprobs(logits.float(), chosen, [min(count, self._vocab_size)] * len(tokens))

    def _logprobs(self, raw: torch.Tensor, tokens: torch.Tensor, slots: Ints) -> dict[int, TokenLogprobs]:
        asked: dict[int, int] = {}
        for place, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            if row is not None and row.sampling.logprobs is not None:
                asked[place] = min(row.sampling.logprobs, self._vocab_size)
        if not asked:
            return {}
        places = to_device(np.array(list(asked), np.int64), raw.device)
        found = _token_logprobs(raw[places], tokens[places], list(asked.values()))
        return {int(slots[place]): one for place, one in zip(asked, found, strict=True)}


def _token_logprobs(raw: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of tokens [N] under float32 logits [N, vocab], with so many of the likeliest tokens each."""
    rows = torch.log_softmax(raw, -1)
    chosen = rows.gather(1, tokens.unsqueeze(-1))
    ranks = (rows > chosen).sum(-1) + 1
    values, ids = rows.topk(max(counts), -1)
    facts = zip(counts, chosen[:, 0].tolist(), ranks.tolist(), values.tolist(), ids.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(best[:count], top[:count], strict=True)))
        for count, logprob, rank, top, best in facts
    ]


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest logit, int64 [R] of [R, vocab]; `NO_TOKEN` where that is not a finite number."""
    largest, places = logits.max(-1)
    return places.masked_fill_(~largest.isfinite(), NO_TOKEN)


def uniform_numbers(seeds: npt.NDArray[np.uint64], counters: Ints) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, counter): two rounds of the SplitMix64 output function (Steele et al. 2014)."""
    mixed = _mix(seeds * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03))
    mixed = _mix(mixed + counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _truncate(scores: torch.Tensor, floats: torch.Tensor, host: npt.NDArray[np.float32], top_k: Ints) -> torch.Tensor:
    """Scores [R, vocab] with -inf for tokens outside top-k, then top-p, then min-p. `host` equals `floats`."""
    vocab_size = scores.shape[1]
    if top_k.min() < vocab_size:
        width = int(top_k[top_k < vocab_size].max())
        best = scores.topk(width, -1).values
        place = to_device(np.minimum(top_k, width) - 1, scores.device)
        threshold = best.gather(1, place.unsqueeze(-1))
        threshold.masked_fill_(to_device(top_k >= vocab_size, scores.device).unsqueeze(-1), _NEG_INF)
        scores = scores.masked_fill(scores < threshold, _NEG_INF)
    if host[:, 1].min() < 1.0:
        ranked = scores.sort(-1, descending=True).values
        probabilities = torch.softmax(ranked, -1)
        before = probabilities.cumsum(-1) - probabilities
        num_kept = (before < floats[:, 1:2]).sum(-1, keepdim=True).clamp_(min=1)
        threshold = ranked.gather(1, num_kept - 1)
        threshold = threshold.masked_fill(floats[:, 1:2] >= 1.0, _NEG_INF)
        scores = scores.masked_fill(scores < threshold, _NEG_INF)
    if host[:, 2].max() > 0.0:
        threshold = scores.amax(-1, keepdim=True) + floats[:, 2:3].log()
        scores = scores.masked_fill(scores < threshold, _NEG_INF)
    return scores
