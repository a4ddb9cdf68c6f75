"""vLLM's example of a connector, KV in a folder, with loads beside steps: a real one for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
)


@dataclass
class BesideSteps(ExampleConnectorMetadata):  # type: ignore[misc]
    """Message to the workers with a step."""

    loads: dict[str, ReqMeta] = field(default_factory=dict)


class StorageBesideSteps(ExampleConnector):  # type: ignore[misc]
    """Saves with the step that computes a prompt, and loads beside steps: what was loaded is reported a step later."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._begun: dict[str, ReqMeta] = {}
        self._loaded: set[str] = set()
        self._reported: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            (table,) = blocks.get_block_ids()
            tokens = list(request.prompt_token_ids)
            self._begun[request.request_id] = ReqMeta.make_meta(tokens, table, self._block_size, False, [])

    def build_connector_meta(self, scheduler_output: Any) -> BesideSteps:
        begun, self._begun = self._begun, {}
        return BesideSteps(super().build_connector_meta(scheduler_output).requests, begun)

    def start_load_kv(self, forward_context: Any, **given: Any) -> None:
        super().start_load_kv(forward_context, **given)
        for name, load in self._get_connector_metadata().loads.items():
            for layer_name, layer in forward_context.no_compile_layers.items():
                file = self._generate_filename_debug(layer_name, load.token_ids, load.mm_hashes)
                saved = safetensors.torch.load_file(file)["kv_cache"]
                slots = load.slot_mapping[: len(saved)]
                layer.kv_cache[slots // self._block_size, :, slots % self._block_size] = saved
            self._loaded.add(name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        reported, self._reported, self._loaded = self._reported, self._loaded, set()
        return None, reported or None
