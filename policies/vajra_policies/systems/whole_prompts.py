"""Checks for schedulers that compute prompts in one piece."""

from __future__ import annotations

from vajra_py.contract import PolicyContext, RequestView


def needs_whole_prompts(context: PolicyContext) -> None:
    """Raise `ValueError` if the replica cannot compute every prompt in one piece."""
    groups = context.limits.kv_parallel_groups
    if groups > 1:
        raise ValueError(
            f"it computes prompts in one piece, which KV parallelism cuts (replica.kv_parallel.groups is {groups})"
        )


def outgrows(request: RequestView, budget: int | None, counted: str = "tokens") -> str | None:
    """Return the reason why a request could get stuck; None if it cannot.

    After a preemption, the prompt and the output so far are computed in one piece. If they exceed the budget, the
    request cannot continue.

    `budget`: largest number of tokens of a step; None: any number. `counted`: what the budget counts, for the message.
    """
    if budget is None or request.num_prompt_tokens + request.max_tokens - 1 <= budget:
        return None
    return (
        f"prompt and output ({request.num_prompt_tokens} + {request.max_tokens} tokens) may have to be computed in one step, "
        f"which takes at most {budget} {counted}"
    )
