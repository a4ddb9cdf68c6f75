"""Output log of a run that computes tokens: the tokens of each request, the reason of its end, and its drafts, in a
file of JSON lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vajra_py.runtime.records.json_lines import JsonLinesFile
from vajra_py.runtime.requests.request import Request

OUTPUTS_FILE = "outputs.jsonl.gz"


class OutputLog(JsonLinesFile):
    """Writer of `outputs.jsonl.gz` during a run."""

    def note(self, request: Request, reason: str, token_ids: Sequence[int], *, is_faulty: bool) -> None:
        """Write a request's line.

        `reason`: the reason of its end, empty if it has not ended; `is_faulty`: True if the request itself failed while
        the token after `token_ids` was computed.
        """
        row: dict[str, Any] = {
            "index": request.index,
            "request_id": request.request_id,
            "reason": reason,
            "detail": request.detail,
            "failed_at": request.num_computed_tokens if is_faulty else None,
            "token_ids": token_ids,
        }
        if request.proposals:
            row["proposals"] = request.proposals
        if drafts := request.draft_log:
            row["drafts"] = drafts
        self.write(row)
