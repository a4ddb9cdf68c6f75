"""Features of OpenAI's and vLLM's APIs that this server does not support, refused by name.

If a field for such a feature were ignored, the client would get something else than it requested. Values
that request nothing (null, false, empty, or listed below as neutral) are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

from vajra_py.errors import did_you_mean

_log = logging.getLogger(__name__)
NOT_SUPPORTED: Final = "not_supported"
"""Error code of a refusal."""
POINTER = 'vLLM\'s own server does; see "Not supported" in docs/reference/server.md'

_TOOLS = "tool calls"
_STRUCTURED = "structured output"
_TEMPLATE = "control of the chat template"
_REASONING = "control of reasoning"
_ADAPTERS = "adapters that clients bring (`model` names those of the settings)"
_MEDIA = "images, audio and other media"
_TRUNCATION = "truncation of prompts"
_SEARCH = "beam search"
_FIELDS: Final[Mapping[str, str]] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "tool_calls": _TOOLS,
    "tool_call_id": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "response_format": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "regex": _STRUCTURED,
    "ebnf": _STRUCTURED,
    "structural_tag": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_decoding_backend": _STRUCTURED,
    "guided_whitespace_pattern": _STRUCTURED,
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "documents": _TEMPLATE,
    "reasoning_effort": _REASONING,
    "reasoning": _REASONING,
    "thinking": _REASONING,
    "thinking_token_budget": _REASONING,
    "verbosity": _REASONING,
    "include_reasoning": _REASONING,
    "modalities": _MEDIA,
    "audio": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "mm_payload": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "return_mm_kwargs": _MEDIA,
    "logits_processors": "logits processors of clients",
    "use_beam_search": _SEARCH,
    "length_penalty": _SEARCH,
    "best_of": _SEARCH,
    "echo": "echo of a conversation",
    "suffix": "filling in before a suffix",
    "prompt_embeds": "embeddings as prompts",
    "truncate_prompt_tokens": _TRUNCATION,
    "truncation_side": _TRUNCATION,
    "web_search_options": "web search",
    "prediction": "predicted outputs",
    "store": "storing of answers",
    "lora_path": _ADAPTERS,
    "lora_request": _ADAPTERS,
    "kv_transfer_params": "transfer of KV blocks",
    "ec_transfer_params": "transfer of encoder outputs",
    "logprob_token_ids": "log-probabilities of chosen tokens",
    "detokenize": "outputs without text (`return_token_ids` gives the tokens besides)",
    "request_id": "names of answers that clients choose (the header X-Request-Id comes back)",
    "return_prompt_text": "prompts in answers (`echo` of `/v1/completions`)",
    "return_token_offsets": "offsets of a prompt's tokens",
    "routed_experts_prompt_start": "experts of prompts' tokens",
    "repetition_detection": "detection of repetition",
    "stream_interval": "intervals of streams",
    "watermarking": "watermarks",
    "vllm_xargs": "arguments for extensions of vLLM",
}
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "length_penalty": (1, 1.0),
    "best_of": (1,),
    "mm_payload": ("tensors",),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "include_reasoning": (True,),
    "detokenize": (True,),
}
_ON_BY_DEFAULT: Final = frozenset(("include_reasoning", "detokenize"))
"""Fields that are true by default, so that the value false requests something."""
_MESSAGE_FIELDS: Final = frozenset(("tool_calls", "tool_call_id", "function_call", "audio"))
NO_EFFECT: Final = frozenset(
    (
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "annotations",
        "spaces_between_special_tokens",  # no effect with fast tokenizers
    )
)
"""Fields of OpenAI's or vLLM's API that have no effect here; they are accepted without a log line."""
_MAX_LOGGED = 256
_PATHS: Final[Mapping[str, str]] = {
    "/v1/responses": "the Responses API",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "Anthropic's Messages API",
    "/v1/moderations": "moderation",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/realtime": "the Realtime API",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/vector_stores": "vector stores",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring",
    "/score": "scoring",
    "/pooling": "pooling",
    "/classify": "classification",
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
}


class Unsupported(ValueError):
    """Error of a request for a feature that this server does not have."""

    def __init__(self, name: str, feature: str) -> None:
        self.field = name
        super().__init__(not_supported(name, feature))


class WrongField(ValueError):
    """Error of a field that is inconsistent with the rest of its body."""

    def __init__(self, name: str, message: str) -> None:
        self.field = name
        super().__init__(f"{name} {message}")


def is_known_elsewhere(name: str) -> bool:
    """Return True if another server's API has a field of this name, so that it does not count as unknown.

    `refuse_unsupported` checks the values of such fields.
    """
    return name in _FIELDS or name in NO_EFFECT


def refuse_unsupported(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse fields that request a feature of other servers. `known` are the fields that this server's body has.

    Raises `Unsupported`.
    """
    for name, value in given.items():
        feature = _FIELDS.get(name)
        if feature is not None and name not in known and _asks(name, value):
            raise Unsupported(name, feature)


def _asks(name: str, value: Any) -> bool:
    """Return True if a field's value requests something. Null, empty values, values in `_NEUTRAL` and, except in
    `_ON_BY_DEFAULT`, false request nothing; the number 0 counts as a request.
    """
    if value is None or (value is False and name not in _ON_BY_DEFAULT):
        return False
    if isinstance(value, str | list | dict) and not value:
        return False
    return not any(type(value) is type(one) and value == one for one in _NEUTRAL.get(name, ()))


def refuse_fields_of(given: Mapping[str, Any], others: Collection[str], path: str) -> None:
    """Refuse the fields `others`, which only bodies of `path` have. Raises `WrongField`."""
    for name in others & given.keys():
        if given[name] not in (None, False):
            raise WrongField(name, f"is a field of {path}, and has no effect here")


def refuse_unsupported_message(given: Mapping[str, Any]) -> None:
    """Refuse a message that has a field of an unsupported feature. Raises `Unsupported`."""
    for name in _MESSAGE_FIELDS & given.keys():
        if given[name]:
            raise Unsupported(name, _FIELDS[name])


def refuse_content_part(kind: Any) -> None:
    """Refuse a part of a message's content if it is of a kind that other servers support besides text. Raises
    `Unsupported`.
    """
    if isinstance(kind, str) and kind in ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file"):
        raise Unsupported(kind, _MEDIA)


def unsupported_path(path: str) -> str | None:
    """Return the feature that another server's API offers at this path; None if no known API has this path."""
    return next((what for known, what in _PATHS.items() if path == known or path.startswith(f"{known}/")), None)


def not_supported(name: str, feature: str) -> str:
    """Return the text of a refusal."""
    return f"{name} is not supported: this server does not offer {feature}. {POINTER}"


class UnknownFields:
    """Handling of unknown fields: ignored with a log line, or refused if the server is strict."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, name: str, known: Collection[str]) -> str | None:
        """Return the text of a refusal, or None if the request is accepted. Each name is logged once."""
        if self._strict:
            return f"{name}: there is no such field. {did_you_mean(name, known)}"
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            _log.warning("the unknown field %.80r of requests is ignored", name)
        return None
