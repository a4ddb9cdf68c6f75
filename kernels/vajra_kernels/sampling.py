"""Sample tokens from logits, in one launch and without waiting for the device.

Only for tensors on devices for which ``backend.uses_triton`` is True: on a CPU, sorting with torch is faster.
"""

from __future__ import annotations

import torch


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return tokens int64 [R] of logits [R, V]; -1 if a logit is NaN or the largest one is infinite.

    Args:
        logits: any float dtype, with dense rows; not modified.
        parameters: float64 [R, len(Column)].
        seen: int32 [H, V], for each history and token: 2 * (count of the token in the output), plus 1 if the token is
            in the prompt.
    """
    from vajra_kernels.draw import sample_launch

    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    sample_launch(tokens, logits, parameters, seen).run()
    return tokens
