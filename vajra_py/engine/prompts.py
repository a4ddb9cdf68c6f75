"""Synthesize prompt tokens for workloads that state only lengths and shared prefixes.

A segment's tokens depend only on its name, its length and the run's seed, so equal segments have equal tokens wherever
they occur. Of two segments with the same name, the longer one starts with the tokens of the shorter one. A segment that
is the output of an earlier request has the tokens that the request generated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vajra_py.workload import RequestSpec, SegmentId

_CACHED_SEGMENTS = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the form that the engine takes.

    Attributes:
        token_ids: tokens of the prompt.
        content: segments that identify the prompt in the prefix cache; None: the tokens identify it.
        shares: True if the prompt may share KV blocks with other requests.
    """

    token_ids: Sequence[int]
    content: tuple[tuple[SegmentId, int], ...] | None
    shares: bool


class PromptMaker:
    """Makes the prompts of one run."""

    def __init__(self, seed: int, vocab_size: int, outputs: Mapping[str, Sequence[int]]) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._key = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
        self._tokens = lru_cache(maxsize=_CACHED_SEGMENTS)(self._made_up)

    def prompt(self, spec: RequestSpec) -> Prompt:
        """Return the prompt of a request that arrives now."""
        if spec.prompt_token_ids is not None:
            return Prompt(spec.prompt_token_ids, None, shares=True)
        if spec.content is None:
            tokens = self._tokens(("prompt", spec.request_id), spec.num_prompt_tokens)
            return Prompt(tokens, None, shares=False)
        content: list[tuple[SegmentId, int]] = []
        token_ids: list[int] = []
        for name, length in spec.content.segments:
            known = self._known(name, length)
            if len(known):
                content.append((name, len(known)))
                token_ids += known
            # Missing tokens are made up if an earlier request's output is unfinished, or shorter than in the workload.
            if len(known) < length:
                own = ("prompt", spec.request_id, len(token_ids))
                content.append((own, length - len(known)))
                token_ids += self._tokens(own, length - len(known))
        return Prompt(token_ids, tuple(content), shares=True)

    def _known(self, name: SegmentId, length: int) -> Sequence[int]:
        if isinstance(name, tuple) and len(name) == 2 and name[0] == "out":
            return self._outputs.get(str(name[1]), ())[:length]
        return self._tokens(name, length)

    def _made_up(self, name: SegmentId, length: int) -> list[int]:
        digest = hashlib.blake2b(repr(name).encode(), digest_size=16, key=self._key).digest()
        stream = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        tokens: list[int] = stream.integers(0, self._vocab_size, length).tolist()
        return tokens


def request_seed(run_seed: int, request_id: str) -> int:
    """Return the seed of a request's random stream, used if its client gives none."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, key=str(run_seed).encode()).digest()
    return int.from_bytes(digest, "little") >> 1
