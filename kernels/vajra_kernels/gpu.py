"""The Triton launches of one paged-attention call.

Invariants:
    - A batch that has only decodes uses the split-KV decode kernel; one without leading decodes uses the ragged kernel.
    - A mixed batch uses one ragged launch if the KV of every sequence is too short to be split by the ragged kernel
      (``config.chunk_splits``). Otherwise the batch's decodes use the decode kernel, since in the ragged kernel a
      single program may have to read all of a decode's long context.
"""

from __future__ import annotations

from dataclasses import replace

from vajra_kernels.call import AttentionCall
from vajra_kernels.config import MIN_CHUNK_SPLIT_TOKENS, DeviceFacts
from vajra_kernels.decode import decode_launches
from vajra_kernels.launch import Launch, device_facts
from vajra_kernels.ragged import ragged_launches

ONE_LAUNCH_KV_TOKENS = 2 * MIN_CHUNK_SPLIT_TOKENS - 1
"""Largest KV length, in tokens, in a mixed batch that uses a single launch; with one token more, the ragged kernel may
split the KV of a chunk into two parts."""


def attention_launches(call: AttentionCall, device: DeviceFacts) -> list[Launch]:
    """Return the launches that compute ``call``, in order."""
    metadata = call.metadata
    if metadata.num_decodes == metadata.num_seqs:
        return decode_launches(call, device)
    if metadata.num_decodes == 0 or metadata.max_kv_len <= ONE_LAUNCH_KV_TOKENS:
        return ragged_launches(call, device)
    decodes, chunks = metadata.parts()
    n = metadata.num_decodes
    front = replace(
        call,
        q=call.q[:n],
        out=call.out[:n],
        lse=None if call.lse is None else call.lse[:n],
        metadata=decodes,
    )
    return [*decode_launches(front, device), *ragged_launches(replace(call, metadata=chunks), device)]


def run_attention(call: AttentionCall) -> None:
    """Compute ``call`` with Triton, writing its ``out`` and ``lse``."""
    for launch in attention_launches(call, device_facts(call.q.device)):
        launch.run()
