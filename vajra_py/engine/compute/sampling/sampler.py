"""Sample a token from each row's logits.

Invariants:
    - A row whose logits have no finite maximum (NaN, overflow, no token allowed) gives `NO_TOKEN`, and does not affect
      other rows.
    - A token depends on its row's logits and its request's parameters, seed and number of tokens so far; not on other
      rows. Each draw uses one number, made from (seed, number of output tokens) by a counter-based generator on the
      host, so the number is the same on every device and after a preemption.
    - Truncation keeps or drops tokens of equal probability together, so that the order of sorting does not matter.
    - No operation waits for the device. On a GPU all rows are sampled in one launch.
    - An exception leaves the state of every row as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vajra_kernels import uses_triton
from vajra_kernels.operands import Column
from vajra_kernels.sampling import sample_tokens
from vajra_py.engine.compute.batch import Ints
from vajra_py.engine.compute.interface import NewRow, SamplingParams
from vajra_py.engine.compute.sampling.constraints import Constraints
from vajra_py.engine.compute.sampling.logprobs import PendingLogprobs, token_logprobs
from vajra_py.engine.compute.sampling.needs import needs_history
from vajra_py.engine.compute.sampling.penalties import Histories, apply_penalties
from vajra_py.engine.compute.transfer import to_device

Doubles = npt.NDArray[np.float64]
Logprobs = tuple[list[int], PendingLogprobs]
"""Slots, and the log-probabilities of their sampled tokens."""
_NEG_INF = float("-inf")
NO_TOKEN = -1
"""Token of a row that cannot be sampled."""


@dataclass(slots=True)
class RowState:
    """The part of a slot's state that is not in the sampler's arrays."""

    sampling: SamplingParams
    ending_tokens: Ints
    """Ids of tokens that must not be sampled before `min_tokens`; empty if `min_tokens` is 0."""


class Sampler:
    """Samples the next tokens of batches of rows. The state of each request is kept by slot."""

    __slots__ = ("_constraints", "_device", "_eos", "_histories", "_is_plain", "_min_tokens", "_num_outputs", "_parameters", "_rows",
                 "_seeds", "_vocab_size")  # fmt: skip

    def __init__(
        self, max_requests: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        # Some models state an id beyond their vocabulary, which no row can sample.
        self._eos = {token for token in eos_token_ids if 0 <= token < vocab_size}
        self._rows: list[RowState | None] = [None] * max_requests
        self._histories = Histories(vocab_size, device)
        self._constraints = Constraints(max_requests, vocab_size, device)
        self._is_plain = np.ones(max_requests, bool)
        self._parameters: Doubles = np.zeros((max_requests, len(Column)))
        self._parameters[:, Column.HISTORY] = -1
        self._seeds = np.zeros(max_requests, np.uint64)
        self._num_outputs: Ints = np.zeros(max_requests, np.int64)
        self._min_tokens: Ints = np.zeros(max_requests, np.int64)

    def add(self, new: NewRow) -> None:
        """Add a request to a slot. Raises `IndexError` for a token outside the vocabulary."""
        sampling, slot = new.sampling, new.slot
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos)
        ids = np.array(sorted(ending) if sampling.min_tokens else [], np.int64)
        if ids.size and not 0 <= ids[0] <= ids[-1] < self._vocab_size:
            raise IndexError(f"a token that ends it is not among the model's {self._vocab_size}")
        history = -1
        if needs_history(sampling):
            history = self._histories.add(new.prompt_token_ids, new.output_token_ids)
        try:
            is_constrained = self._constraints.add(slot, sampling, new.output_token_ids)
        except BaseException:
            if history >= 0:
                self._histories.remove(history)
            raise
        self._rows[slot] = RowState(sampling, ids)
        is_free = history < 0 and not ids.size and not is_constrained
        self._is_plain[slot] = sampling.temperature == 0.0 and is_free and sampling.logprobs is None
        row = self._parameters[slot]
        row[Column.TEMPERATURE] = sampling.temperature
        row[Column.TOP_P] = sampling.top_p
        row[Column.MIN_P] = sampling.min_p
        row[Column.TOP_K] = min(sampling.top_k or self._vocab_size, self._vocab_size)
        row[Column.REPETITION] = sampling.repetition_penalty
        row[Column.FREQUENCY] = sampling.frequency_penalty
        row[Column.PRESENCE] = sampling.presence_penalty
        row[Column.HISTORY] = history
        self._seeds[slot] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._num_outputs[slot] = new.num_output_tokens
        self._min_tokens[slot] = sampling.min_tokens

    def remove(self, slot: int) -> None:
        """Remove the request in this slot."""
        history = int(self._parameters[slot, Column.HISTORY])
        if history >= 0:
            self._histories.remove(history)
        self._parameters[slot, Column.HISTORY] = -1
        self._constraints.remove(slot)
        self._rows[slot] = None
        self._is_plain[slot] = True

    def set_num_outputs(self, slot: int, num_tokens: int) -> None:
        """Set the number of output tokens so far of the request in this slot."""
        self._num_outputs[slot] = num_tokens

    def undo(self, slots: Sequence[int]) -> None:
        """Take back one output token of each of these slots; their sampling must not depend on their outputs."""
        self._num_outputs[list(slots)] -= 1

    def sample(
        self,
        logits: torch.Tensor,
        slots: Ints,
        likeliest: torch.Tensor | None = None,
        offsets: Ints | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Sample tokens int64 [R] from logits [R, vocab] for these slots.

        Return the tokens, and the log-probabilities of slots with `logprobs` (None if there are none).

        `likeliest`: result of `likeliest_tokens(logits)`, if the caller has it. This tensor itself is returned if every
        row is greedy and has no penalties, constraints or log-probabilities. `offsets`: with drafts, number of drafts
        of the same slot before each row; `slots` then contains a slot several times.
        """
        if self._is_plain[slots].all():
            tokens = likeliest_tokens(logits) if likeliest is None else likeliest
            self._num_outputs[slots] += 1
            return tokens, None
        parameters = self._parameters[slots]
        parameters[:, Column.NUMBER] = uniform_numbers(
            self._seeds[slots], self._num_outputs[slots] if offsets is None else self._num_outputs[slots] + offsets
        )
        possible = self._constraints.apply(self._without_early_ends(logits, slots), slots)
        if uses_triton(self._device):
            tokens = sample_tokens(possible, to_device(parameters, self._device), self._histories.seen)
        else:
            tokens = self._sorted_sample(possible.float(), parameters)
        logprobs = self._logprobs(logits, tokens, slots)
        self._num_outputs[slots] += 1
        self._histories.count(parameters[:, Column.HISTORY].astype(np.int64), tokens)
        self._constraints.count(tokens, slots)
        return tokens, logprobs

    def _without_early_ends(self, logits: torch.Tensor, slots: Ints) -> torch.Tensor:
        """Return logits without the tokens that would end a request before its `min_tokens`.

        `logits` is not changed.
        """
        early = np.flatnonzero(self._num_outputs[slots] < self._min_tokens[slots]).tolist()
        endings = [row.ending_tokens for row in (self._rows[slots[place]] for place in early) if row is not None]
        if not any(one.size for one in endings):
            return logits
        places = np.repeat(np.array(early, np.int64), [one.size for one in endings])
        index = to_device(places * self._vocab_size + np.concatenate(endings), logits.device)
        possible = logits.clone(memory_format=torch.contiguous_format)
        possible.view(-1).index_fill_(0, index, _NEG_INF)
        return possible

    def _sorted_sample(self, logits: torch.Tensor, parameters: Doubles) -> torch.Tensor:
        """Sample like `sample_tokens`, in plain torch: tokens int64 [R] from float32 logits [R, vocab]."""
        adjusted = apply_penalties(logits, parameters, self._histories)
        tokens = likeliest_tokens(adjusted)
        drawn = np.flatnonzero(parameters[:, Column.TEMPERATURE] > 0.0)
        if drawn.size:
            index = to_device(drawn, self._device)
            lost = tokens[index] == NO_TOKEN
            tokens[index] = draw(adjusted[index], parameters[drawn]).masked_fill_(lost, NO_TOKEN)
        return tokens

    def score(self, logits: torch.Tensor, tokens: Sequence[int], slot: int) -> PendingLogprobs:
        """Return the log-probabilities of given tokens [N] under logits [N, vocab].

        With each token, as many of the most likely tokens are reported as the slot's `prompt_logprobs` states.
        """
        row = self._rows[slot]
        count = 0 if row is None or row.sampling.prompt_logprobs is None else row.sampling.prompt_logprobs
        chosen = to_device(np.array(tokens, np.int64), logits.device)
        return token_logprobs(logits, chosen, [min(count, self._vocab_size)] * len(tokens))

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, slots: Ints) -> Logprobs | None:
        asked: dict[int, int] = {}
        for place, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            if row is not None and row.sampling.logprobs is not None:
                asked[place] = min(row.sampling.logprobs, self._vocab_size)
        if not asked:
            return None
        places = to_device(np.array(list(asked), np.int64), logits.device)
        found = token_logprobs(logits[places], tokens[places].clamp_min_(0), list(asked.values()))
        return slots[list(asked)].tolist(), found


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest logit, int64 [R], from logits [R, vocab]; `NO_TOKEN` if that logit is not
    finite.
    """
    if not uses_triton(logits.device):  # on a CPU, numpy's argmax is vectorised, torch's is not
        values = logits.float().numpy()
        found = values.argmax(-1)
        found[~np.isfinite(values[np.arange(len(found)), found])] = NO_TOKEN
        return torch.from_numpy(found)
    largest, places = logits.max(-1)
    return places.masked_fill_(~largest.isfinite(), NO_TOKEN)


def uniform_numbers(seeds: npt.NDArray[np.uint64], counters: Ints) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, counter).

    It is the result of two rounds of the SplitMix64 output function (Steele et al. 2014).
    """
    mixed = _mix(seeds * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03))
    mixed = _mix(mixed + counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits: torch.Tensor, parameters: Doubles) -> torch.Tensor:
    """Draw one token per row of float32 logits [R, vocab], by inverting the kept tokens' cumulative distribution."""
    temperature = parameters[:, Column.TEMPERATURE].astype(np.float32)
    # Subtract the largest logit, so that dividing by a small temperature does not overflow.
    scores = (logits - logits.amax(-1, keepdim=True)) / to_device(temperature, logits.device).unsqueeze(-1)
    cumulated = torch.softmax(truncate(scores, parameters), -1).double().cumsum_(-1)
    numbers = to_device(parameters[:, Column.NUMBER].copy(), logits.device)
    # `right=True` skips tokens of probability 0. Rounding may make the last cumulated entry differ from 1, so the
    # targets are scaled by that entry: no target then lies beyond the last token.
    targets = (numbers.unsqueeze(-1) * cumulated[:, -1:]).minimum(cumulated[:, -1:] * (1.0 - 1e-12))
    return torch.searchsorted(cumulated, targets, right=True).squeeze(-1).clamp_max_(logits.shape[1] - 1)


def truncate(scores: torch.Tensor, parameters: Doubles) -> torch.Tensor:
    """Return scores [R, vocab] with -inf for tokens outside top-k, then top-p, then min-p.

    Scores are sorted at most once, and only up to the largest top-k if every row that needs sorting sets top-k.
    """
    vocab_size = scores.shape[1]
    top_k = parameters[:, Column.TOP_K].astype(np.int64)
    top_p, min_p = (parameters[:, column].astype(np.float32) for column in (Column.TOP_P, Column.MIN_P))
    is_cut = (top_p < 1.0) | (top_k < vocab_size)
    if is_cut.any():
        width = int(top_k[is_cut].max())
        ranked = scores.topk(width, -1).values if width < vocab_size else scores.sort(-1, descending=True).values
        place = to_device(np.minimum(top_k, width) - 1, scores.device)
        threshold = ranked.gather(1, place.unsqueeze(-1))
        threshold.masked_fill_(to_device(top_k >= vocab_size, scores.device).unsqueeze(-1), _NEG_INF)
        scores = scores.masked_fill(scores < threshold, _NEG_INF)
        if top_p.min() < 1.0:
            limits = to_device(top_p, scores.device).unsqueeze(-1)
            ranked = ranked.masked_fill_(ranked < threshold, _NEG_INF)
            probabilities = torch.exp(ranked - scores.logsumexp(-1, keepdim=True))
            before = probabilities.cumsum(-1) - probabilities
            num_kept = (before < limits).sum(-1, keepdim=True).clamp_(min=1)
            threshold = ranked.gather(1, num_kept - 1).masked_fill_(limits >= 1.0, _NEG_INF)
            scores = scores.masked_fill(scores < threshold, _NEG_INF)
    if min_p.max() > 0.0:
        threshold = scores.amax(-1, keepdim=True) + to_device(min_p, scores.device).unsqueeze(-1).log()
        scores = scores.masked_fill(scores < threshold, _NEG_INF)
    return scores
