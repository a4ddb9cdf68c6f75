"""A connector whose answers the requests bring along: how much there is to load, how, when it comes, and what fails.

`kv_transfer_params` of a request are its script (`Script`). Time is `turn`, which whoever drives the scheduler sets. The workers' side
is played by `ScriptedWorker`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.utils import ConstantList


@dataclass(frozen=True)
class Script:
    """Behaviour of the connector for one request.

    Attributes:
        remote: leading tokens that can be loaded.
        load_turns: turns that a load takes; 0: it is part of the step that admits the request.
        once: True if there is nothing more after a load.
        unknown_until: turn before which it does not know what there is.
        send_turns: turns for which the blocks are needed after the end; None: they are not.
        bad_block: block of the load to which nothing comes.
        bad_steps: steps after which that is reported, of a load within a step.
        fails: True if nothing of a load comes.
    """

    remote: int = 0
    load_turns: int = 0
    once: bool = True
    unknown_until: int = 0
    send_turns: int | None = None
    bad_block: int | None = None
    bad_steps: int = 0
    fails: bool = False


@dataclass
class Load:
    """A load, as workers are told of it."""

    name: str
    tables: tuple[list[int], ...]
    start: int
    end: int
    is_async: bool
    due: int


@dataclass
class ScriptedMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Message to the workers with a step."""

    loads: list[Load] = field(default_factory=list)
    sends: dict[str, tuple[int, tuple[list[int], ...], int]] = field(default_factory=dict)
    """Requests whose blocks are needed, the turn until which they are, the block tables, and the tokens in them."""


class ScriptedConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.turn = 0
        self.calls: list[tuple[Any, ...]] = []
        """Calls, as far as schedulers are to agree on them."""
        self.is_shut_down = False
        self.events: list[Any] = []
        self._size = vllm_config.cache_config.block_size
        self._asked: dict[str, tuple[int, bool]] = {}
        self._has_loaded: set[str] = set()
        self._kept: dict[str, tuple[Any, Any, Any]] = {}
        """Requests that have not ended, with their lists of tokens and of hashes, which grow."""
        self._metadata = ScriptedMetadata()

    def on_new_request(self, request: Any) -> None:
        self.calls.append(("new", request.request_id))
        self._kept[request.request_id] = request, request.all_token_ids, ConstantList(request.block_hashes)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name, script = request.request_id, Script(**request.kv_transfer_params or {})
        assert request.num_computed_tokens == 0
        num_tokens: int | None = min(script.remote, request.num_prompt_tokens) // self._size * self._size
        assert num_tokens is not None
        is_async = script.load_turns > 0
        if not is_async:
            num_tokens = min(num_tokens, request.num_tokens - 1)
        num_tokens = max(0, num_tokens - num_computed_tokens)
        if self.turn < script.unknown_until:
            num_tokens = None
        elif script.once and name in self._has_loaded:
            num_tokens = 0
        self._asked[name] = num_computed_tokens, is_async
        said = (self.turn, "matched", name, request.num_tokens, request.num_preemptions, str(request.status))
        self.calls.append((*said, num_computed_tokens, num_tokens))
        return num_tokens, is_async and bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, tables = request.request_id, blocks.get_block_ids()
        begins = num_external_tokens and self._asked[name][1]
        unhashed = blocks.get_unhashed_block_ids_all_groups() if begins else ()
        assert all(set(one) <= set(table) for one, table in zip(unhashed, tables, strict=False))
        counts = [len(table) - table.count(0) for table in tables], sum(map(len, unhashed))
        said = num_external_tokens, *counts, request.num_computed_tokens
        self.calls.append((self.turn, "allocated", name, *said))
        if num_external_tokens:
            start, is_async = self._asked[name]
            due = self.turn + Script(**request.kv_transfer_params).load_turns
            self._has_loaded.add(name)
            self._metadata.loads.append(Load(name, tables, start, start + num_external_tokens, is_async, due))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        for name in scheduler_output.num_scheduled_tokens:
            held = [block for table in state.get_block_ids(name) for block in table if block]
            assert len(held) == len(set(held))
        assert state.get_block_ids("nobody's") is None
        assert scheduler_output.has_sync_kv_loads is any(not one.is_async for one in self._metadata.loads)
        for request, tokens, hashes in self._kept.values() if cached.req_ids else ():
            found = request.num_computed_tokens, request.num_output_tokens, sum(tokens), hash(tuple(hashes))
            self.calls.append((self.turn, "read", request.request_id, *found))
        self.calls.append((self.turn, "built", sorted(scheduler_output.num_scheduled_tokens), sorted(cached.req_ids)))
        made, self._metadata = self._metadata, ScriptedMetadata()
        return made

    def update_connector_output(self, connector_output: Any) -> None:
        told = [sorted(each or ()) for each in (connector_output.finished_recving, connector_output.finished_sending)]
        self.calls.append((self.turn, "reported", *told))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, (block_ids,))

    def _finished(self, request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        held = [len(table) - table.count(0) for table in tables]
        del self._kept[request.request_id]
        script = Script(**request.kv_transfer_params or {})
        is_complete = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        keeps = is_complete and script.send_turns is not None and any(held)
        said = (request.request_id, str(request.status), held, request.num_computed_tokens)
        self.calls.append(("finished", *said, len(request.all_token_ids), len(request.block_hashes)))
        if keeps:
            due, num_tokens = (
                self.turn + (script.send_turns or 0),
                min(request.num_computed_tokens, request.num_tokens - 1),
            )
            self._metadata.sends[request.request_id] = due, tables, num_tokens
        return keeps, {"blocks": held, "tokens": list(request.output_token_ids)} if is_complete else None

    def take_events(self) -> list[Any]:
        taken, self.events = self.events, []
        return taken

    def shutdown(self) -> None:
        self.is_shut_down = True

    # The workers' side is played by `ScriptedWorker`

    def start_load_kv(self, forward_context: Any, **given: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **given: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class GroupedConnector(ScriptedConnector, SupportsHMA):  # type: ignore[misc]
    """The same for models with several groups of KV blocks."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids)


@dataclass
class ScriptedWorker:
    """The workers' side: loads come when they are due, and are reported with the step.

    Attributes:
        script: of a request.
        write: puts the content of a request's tokens into its blocks.
    """

    size: int
    script: Callable[[str], Script]
    write: Callable[[str, tuple[list[int], ...], int, int], None]
    loads: list[Load] = field(default_factory=list)
    sends: dict[str, tuple[int, tuple[list[int], ...], int]] = field(default_factory=dict)
    sent: dict[str, tuple[tuple[list[int], ...], int]] = field(default_factory=dict)
    """Requests whose blocks were reported as sent last, with block tables and tokens."""
    num_steps: int = 0
    bad: list[tuple[int, set[int]]] = field(default_factory=list)
    """Blocks of loads within steps to which nothing came, and the step that reports them."""

    def begin(self, metadata: ScriptedMetadata) -> set[int]:
        """Take what the scheduler tells with a step, whose loads come at once; returns blocks to which nothing came."""
        self.loads += [one for one in metadata.loads if one.is_async]
        self.sends |= metadata.sends
        self.num_steps += 1
        for load in metadata.loads:
            if not load.is_async:
                self.bad.append((self.num_steps + self.script(load.name).bad_steps, self._arrive(load)))
        due = [blocks for step, blocks in self.bad if step <= self.num_steps]
        self.bad = [one for one in self.bad if one[0] > self.num_steps]
        return set().union(*due)

    def _arrive(self, load: Load) -> set[int]:
        script = self.script(load.name)
        first, last = load.start // self.size, -(-load.end // self.size)
        places = range(first, last)
        bad = {place for place in places if script.bad_block is not None and place == first + script.bad_block}
        if not script.fails:
            for place in places:
                if place not in bad:
                    end = min(load.end, (place + 1) * self.size)
                    self.write(load.name, load.tables, max(load.start, place * self.size), end)
        return {load.tables[0][place] for place in bad}

    def report(self, turn: int, bad: set[int]) -> KVConnectorOutput | None:
        """Return what is due; `bad`: blocks of loads within the step to which nothing came."""
        over = [one for one in self.loads if one.due <= turn]
        self.loads = [one for one in self.loads if one.due > turn]
        self.sent = sent = {name: (tables, count) for name, (due, tables, count) in self.sends.items() if due <= turn}
        self.sends = {name: one for name, one in self.sends.items() if name not in sent}
        for load in over:
            bad |= self._arrive(load)
        failed = {one.name for one in over if self.script(one.name).fails}
        made = KVConnectorOutput(
            finished_sending=dict.fromkeys(sorted(sent)) or None,  # in an order, as blocks are freed in it
            finished_recving=dict.fromkeys(sorted(one.name for one in over)) or None,
            invalid_block_ids=bad,
            failed_recving=failed,
        )
        return None if made.is_empty() else made
