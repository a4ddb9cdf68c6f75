"""Times of the collectives of one step: those of every layer, of the embedding, and of the logits."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.latency.hardware.model_spec import DTYPE_BYTES, ModelSpec
from vajra_py.latency.operators.bundle_files import Samples
from vajra_py.latency.operators.dense_times import interpolated


@dataclass(frozen=True, slots=True)
class Link:
    """Link between the GPUs of one replica."""

    bytes_per_s: float
    """Bandwidth in one direction that collectives reach, in bytes per second."""
    latency_s: float
    """Latency of an empty collective, in seconds."""


class Collectives:
    """Collectives of `tensor` tensor-parallel ranks, and of `ranks` data-parallel ranks that divide the experts.

    Times of all-reduces are interpolated by bytes between measured ones (`measured`). Without measured times, and for
    the collectives before and after the experts, a time is the link's latency, plus the bytes that one GPU sends
    divided by the bandwidth.
    """

    def __init__(self, model: ModelSpec, tensor: int, ranks: int, link: Link | None, measured: Samples | None) -> None:
        self._model, self._tensor, self._ranks = model, tensor, ranks
        self._link, self._measured = link, measured
        self._bytes_each = 2 if model.dtype == "fp8" else DTYPE_BYTES[model.dtype]

    def layers_s(self, tokens: int, all_tokens: int) -> float:
        """Return the seconds of all collectives except the gather of the logits.

        `tokens` is the number of tokens on the fullest rank, `all_tokens` the number on all ranks.
        """
        state, seconds = tokens * self._model.hidden_size * self._bytes_each, 0.0
        if self._tensor > 1:
            # An all-reduce follows the embedding, each attention part, and each feed-forward part.
            seconds += (2 * self._model.num_layers + 1) * self._reduced_s(state)
        if self._ranks > 1 and self._model.experts is not None and self._link is not None:
            # An all-gather precedes the experts, and a reduce-scatter follows them. In each of these two, a rank
            # exchanges the tokens of all other ranks. No other rank has more tokens than the fullest rank, and together
            # they have at most all tokens.
            others = min((self._ranks - 1) * tokens, all_tokens)
            moved = others * self._model.hidden_size * self._bytes_each / self._link.bytes_per_s
            seconds += 2 * self._model.experts.num_layers * (self._link.latency_s + moved)
        return seconds

    def scores_s(self, sequences: int) -> float:
        """Return the seconds to gather the logits; each tensor-parallel rank computes the logits of a part of the
        vocabulary.
        """
        if self._tensor == 1:
            return 0.0
        # An all-gather sends half as many bytes as an all-reduce of the same size.
        return self._reduced_s(sequences * self._model.vocab_size * self._bytes_each / 2.0)

    def _reduced_s(self, size: float) -> float:
        """Return the seconds of one all-reduce of `size` bytes over the tensor-parallel ranks."""
        if self._measured is not None:
            return 1e-6 * interpolated(self._measured.sizes, self._measured.times_us, size)
        if self._link is None:
            return 0.0
        return self._link.latency_s + 2 * (self._tensor - 1) / self._tensor * size / self._link.bytes_per_s
