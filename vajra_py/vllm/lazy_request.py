"""Requests of vLLM that are updated when a connector reads them, so that a steady step of decodes modifies none.

Output, block hashes and computed tokens of a request change with every step, and a connector reads few of them. A lazy
request takes them from its record and from the mechanism on access, also through views of its tokens and hashes that
other objects keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request as VllmRequest
from vllm.v1.utils import ConstantList

from vajra_py.vllm.records import Record


class _View(ConstantList[Any]):  # type: ignore[misc]
    """View of a lazy request's tokens or block hashes, which is up to date on each access, like vLLM's lists."""

    def __init__(self, request: VllmRequest, name: str) -> None:
        self._request = request
        self._name = name

    @property
    def _x(self) -> list[Any]:
        return _brought_up(self._request, self._name)


class LazyRequest(VllmRequest):  # type: ignore[misc]
    """vLLM request whose output, hashes and computed tokens are looked up on access."""

    _record: Record
    _find_computed: Callable[[Record], int]

    @property
    def _output_token_ids(self) -> list[int]:
        return _brought_up(self, "_output_token_ids")

    @property
    def _all_token_ids(self) -> list[int]:
        return _brought_up(self, "_all_token_ids")

    @property
    def output_token_ids(self) -> ConstantList[int]:
        """Token ids of the output so far."""
        return _View(self, "_output_token_ids")

    @property
    def all_token_ids(self) -> ConstantList[int]:
        """Token ids of prompt and output so far."""
        return _View(self, "_all_token_ids")

    @property
    def block_hashes(self) -> ConstantList[Any]:
        """Hashes of the full blocks of prompt and output."""
        return _View(self, "block_hashes")

    @property
    def num_computed_tokens(self) -> int:
        """Number of computed tokens: the value that was set last or, if that is None, the mechanism's number."""
        was_set: int | None = self.__dict__["num_computed_tokens"]
        return self._find_computed(self._record) if was_set is None else was_set

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int | None) -> None:
        """Set the number of computed tokens; None selects the mechanism's number."""
        self.__dict__["num_computed_tokens"] = num_tokens

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Do nothing: the record has these tokens already."""

    def update_block_hashes(self) -> None:
        """Do nothing: hashes are updated when they are read."""


def make_lazy(record: Record, find_computed: Callable[[Record], int]) -> None:
    """Make a record's request lazy until `settle` is called."""
    request = record.request
    request._record, request._find_computed = record, find_computed
    request.__class__ = LazyRequest


def settle(request: VllmRequest) -> None:
    """Give an ended request its final values, and make it independent of its record."""
    if isinstance(request, LazyRequest):
        _brought_up(request, "block_hashes")
        request.num_computed_tokens = request.num_computed_tokens
        request.__class__ = VllmRequest
        del request._record, request._find_computed


def _brought_up(request: VllmRequest, name: str) -> list[Any]:
    """Update and return one of a request's own lists (tokens or hashes)."""
    lists = request.__dict__
    record: Record | None = lists.get("_record")
    if record is not None:
        output: list[int] = lists["_output_token_ids"]
        if len(output) < len(record.output):
            new = record.output[len(output) :]
            output += new
            lists["_all_token_ids"] += new
            if request._block_hasher is not None:
                lists["block_hashes"] += request._block_hasher(request)
    found: list[Any] = lists[name]
    return found
