"""Log-probabilities of tokens, transferred from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vajra_py.engine.compute.interface import TokenLogprobs
from vajra_py.engine.compute.transfer import to_host


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of N tokens, available on the host once the device's stream has completed them.

    Attributes:
        counts: number of most likely tokens to report with each token.
        chosen: log-probabilities of the tokens, float32 [N].
        ranks: ranks of the tokens by probability, from 1, int64 [N].
        values: log-probabilities of the most likely tokens, float32 [N, largest count].
        ids: ids of the most likely tokens, int64 [N, largest count].
    """

    counts: Sequence[int]
    chosen: torch.Tensor
    ranks: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def result(self) -> list[TokenLogprobs]:
        """Return the log-probabilities; the device must have finished computing them."""
        columns = (self.chosen.tolist(), self.ranks.tolist(), self.values.tolist(), self.ids.tolist())
        return [
            TokenLogprobs(logprob, rank, tuple(zip(best[:count], top[:count], strict=True)))
            for count, logprob, rank, top, best in zip(self.counts, *columns, strict=True)
        ]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> PendingLogprobs:
    """Start computing log-probabilities from logits [N, vocab]: of `tokens` [N] and of each row's likeliest tokens.

    `counts`: number of likeliest tokens to report for each row.
    """
    rows = torch.log_softmax(logits.float(), -1)
    chosen = rows.gather(1, tokens.unsqueeze(-1))
    ranks = (rows > chosen).sum(-1) + 1
    values, ids = rows.topk(max(counts), -1)
    return PendingLogprobs(counts, *map(to_host, (chosen[:, 0], ranks, values, ids)))
