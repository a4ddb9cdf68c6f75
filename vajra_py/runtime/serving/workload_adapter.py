"""Extract a workload request's facts and the hashes of its prompt's blocks."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from vajra_py.runtime.kv import BlockHashes, PrivateBlockHashes, SegmentBlockHashes, TokenBlockHashes
from vajra_py.runtime.kv.block_hashes import RecentPrompts, adapter_salt
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.workload import RequestSpec
from vajra_py.workload.generated import maker

_FACTS = tuple(entry.name for entry in fields(RequestFacts))
_facts_in = attrgetter(*_FACTS)
_make_facts = maker(RequestFacts, _FACTS)


def facts_of(spec: RequestSpec) -> RequestFacts:
    """Return the facts that the client states, which do not include the true output length."""
    return _make_facts(*_facts_in(spec))


def hashes_of(
    spec: RequestSpec, block_size: int, salt: str, *, reads_cache: bool = True, recent: RecentPrompts | None = None
) -> BlockHashes:
    """Return the hashes of a prompt's blocks: of its token ids if these are known, else of its content segments if
    these are known, else hashes that no other request has.

    Without `reads_cache`, a request with token ids gets no prefix hits, but its blocks are cached for other requests.
    `recent`: earlier prompts of the same run.
    """
    if spec.adapter:
        salt = adapter_salt(salt, spec.adapter)
    if spec.prompt_token_ids is not None:
        return TokenBlockHashes(spec.prompt_token_ids, block_size, salt, reads_cache=reads_cache)
    if spec.content is not None:
        return SegmentBlockHashes(spec.content.segments, spec.request_id, block_size, salt, recent=recent)
    return PrivateBlockHashes(spec.request_id)
