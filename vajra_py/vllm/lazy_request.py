"""Requests of vLLM as a connector reads them: brought up to date when they are read, so that a steady step touches no request.

Output, block hashes and computed tokens of a request change with every step, and a connector looks at few of them. A request that is
made lazy takes them from its record and from the mechanism, also through views of its tokens and hashes that are kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request as VllmRequest
from vllm.v1.utils import ConstantList

from vajra_py.vllm.records import Record


class _View(ConstantList[Any]):  # type: ignore[misc]
    """Tokens or block hashes of a lazy request, up to date at each look, as vLLM's lists are."""

    def __init__(self, request: VllmRequest, name: str) -> None:
        self._request = request
        self._name = name

    @property
    def _x(self) -> list[Any]:
        return _brought_up(self._request, self._name)


class LazyRequest(VllmRequest):  # type: ignore[misc]
    """A request of vLLM's whose output, hashes and computed tokens are looked up when they are read."""

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
        """Output so far."""
        return _View(self, "_output_token_ids")

    @property
    def all_token_ids(self) -> ConstantList[int]:
        """Prompt and output so far."""
        return _View(self, "_all_token_ids")

    @property
    def block_hashes(self) -> ConstantList[Any]:
        """Hashes of the full blocks of these."""
        return _View(self, "block_hashes")

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens: those that were set, or the mechanism's."""
        was_set: int | None = self.__dict__["num_computed_tokens"]
        return self._find_computed(self._record) if was_set is None else was_set

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int | None) -> None:
        """Set the computed tokens; None: they are the mechanism's from now on."""
        self.__dict__["num_computed_tokens"] = num_tokens

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Do nothing: the record has these tokens already."""

    def update_block_hashes(self) -> None:
        """Do nothing: hashes follow the tokens when they are read."""


def make_lazy(record: Record, find_computed: Callable[[Record], int]) -> None:
    """Let what changes of a record's request be looked up until `settle`."""
    request = record.request
    request._record, request._find_computed = record, find_computed
    request.__class__ = LazyRequest


def settle(request: VllmRequest) -> None:
    """Bring a request that has ended up to date for good; it does not refer to its record any longer."""
    if isinstance(request, LazyRequest):
        _brought_up(request, "block_hashes")
        request.num_computed_tokens = request.num_computed_tokens
        request.__class__ = VllmRequest
        del request._record, request._find_computed


def _brought_up(request: VllmRequest, name: str) -> list[Any]:
    """Return one of a request's own lists, with its tokens and hashes as far as they are known."""
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
