"""Synthesize prompt tokens for workloads that give lengths and shared prefixes only.

A segment's tokens depend on its name and the run's seed alone, and a longer piece of it begins like a shorter one, so equal
segments are equal tokens wherever they occur. The output of an earlier request is what that request really put out.
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
    """A prompt as the engine takes it.

    Attributes:
        token_ids: its tokens.
        content: segments that identify it in the prefix cache; None: its tokens do.
        shares: whether anyone else may have the same tokens.
    """

    token_ids: Sequence[int]
    content: tuple[tuple[SegmentId, int], ...] | None
    shares: bool


class PromptMaker:
    """Prompts of one run. `outputs` holds the tokens of requests that have ended."""

    def __init__(self, seed: int, vocab_size: int, outputs: Mapping[str, Sequence[int]]) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._key = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
        self._tokens = lru_cache(maxsize=_CACHED_SEGMENTS)(self._made_up)

    def prompt(self, spec: RequestSpec) -> Prompt:
        """The prompt of a request that arrives now."""
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
            if len(known) < length:  # an output that is shorter than in the workload, or not there yet
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
    """The seed of a request's random stream, where its client gives none."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, key=str(run_seed).encode()).digest()
    return int.from_bytes(digest, "little") >> 1
