"""Read the fields of request bodies that routing depends on. The servers check all other fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from pydantic import ConfigDict, Field, create_model

from vajra_py.engine.tokenizer import ChatEnd, HubTokenizer
from vajra_py.errors import ConfigError, Problem
from vajra_py.serve.api.schema_facts import body_fields

RouteBody: Any = create_model(
    "RouteBody",
    __config__=ConfigDict(extra="ignore"),
    model=(str | None, Field(None, max_length=1024)),
    prompt=(Any, None),
    messages=(Any, None),
    max_tokens=(int | None, Field(None, ge=0, le=2**31 - 1)),
    max_completion_tokens=(int | None, Field(None, ge=0, le=2**31 - 1)),
    metadata=(Any, None),
    cache_salt=(str | None, None),
    add_special_tokens=(Any, None),
    add_generation_prompt=(Any, None),
    continue_final_message=(Any, None),
    **body_fields(),
)
"""Pydantic model of the fields of a request body that routing depends on."""

_UNLIMITED = 2**63
BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token if there is no tokenizer."""


class PromptTokenizer(Protocol):
    """Tokenizer of prompts."""

    def encode(self, text: str, *, is_rendered: bool) -> Sequence[int]:
        """Return a text's token ids.

        If `is_rendered` is True, no special tokens are added, because a chat template has added them or the client
        wants none.
        """

    def render_chat(self, messages: Sequence[Mapping[str, Any]], end: ChatEnd) -> str:
        """Return the text of a conversation.

        Raises `ConfigError` if there is no template, or if the template rejects the messages.
        """


class _PlainTokenizer:
    """Tokenizer without chat templates."""

    def __init__(self, encode: Callable[[str, bool], Sequence[int]]) -> None:
        self._encode = encode

    def encode(self, text: str, *, is_rendered: bool) -> Sequence[int]:
        """See `PromptTokenizer`."""
        return self._encode(text, not is_rendered)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], end: ChatEnd) -> str:
        """See `PromptTokenizer`; always raises, since there is no template."""
        raise ConfigError(Problem("messages", "there is no chat template", "Allowed: a model's folder"))


def by_bytes(text: str) -> Sequence[int]:
    """Return one number for each four bytes of a text, as a substitute for token ids.

    The count of these numbers approximates the number of tokens. Texts with equal prefixes give equal first numbers.
    """
    raw = text.encode("utf-8", "replace")
    raw += bytes(-len(raw) % BYTES_PER_TOKEN)
    return cast("list[int]", np.frombuffer(raw, "<u4").tolist())


def tokenizer_of(path: str | None) -> PromptTokenizer:
    """Load the tokenizer at `path`, a model's folder or a tokenizer.json. If `path` is None, four bytes count as one
    token.

    Raises `OSError`, `ValueError` or `ConfigError` if the tokenizer cannot be read.
    """
    if path is None:
        return _PlainTokenizer(lambda text, adds_special: by_bytes(text))
    if Path(path).expanduser().is_dir():
        return HubTokenizer(path)
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain `Exception`
        raise ValueError(str(error)) from None
    return _PlainTokenizer(lambda text, adds_special: found.encode(text, add_special_tokens=adds_special).ids)


def prompt_tokens(body: Any, tokenizer: PromptTokenizer, most_together: int = _UNLIMITED) -> list[int]:
    """Return the token ids of all prompts of a body, concatenated; `[0]` if there are none.

    A result longer than `most_together` is cut to `most_together`, or to the length of the longest prompt if that is
    larger. Content other than text and token ids is left out.
    """
    found: list[int] = []
    if body.messages is None:
        encode, given, longest = partial(tokenizer.encode, is_rendered=body.add_special_tokens is False), body.prompt, 0
        has_several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        for prompt in given if has_several else [given]:
            num_before = len(found)
            _collect(prompt, encode, found)
            longest = max(longest, len(found) - num_before)
        return found[: max(longest, most_together)] or [0]
    messages = _plain_messages(body.messages)
    if messages is not None:
        end = ChatEnd.NOWHERE if body.add_generation_prompt is False else ChatEnd.ANSWER
        try:
            text = tokenizer.render_chat(messages, ChatEnd.MESSAGE if body.continue_final_message is True else end)
            return list(tokenizer.encode(text, is_rendered=body.add_special_tokens is not True)) or [0]
        except ConfigError:  # the server decides whether the messages are valid
            pass
    _collect(body.messages, partial(tokenizer.encode, is_rendered=True), found)
    return found or [0]


def _plain_messages(given: Any) -> list[dict[str, Any]] | None:
    """Return the messages of a conversation with their text parts joined; None if they contain anything but text."""
    found = []
    for one in given if isinstance(given, list) else [None]:
        content = one.get("content") if isinstance(one, dict) else None
        if isinstance(content, list):
            texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(one, dict) or not isinstance(content, str):
            return None
        found.append({**one, "content": content})
    return found


def _collect(given: Any, tokenize: Callable[[str], Sequence[int]], found: list[int]) -> None:
    if isinstance(given, str):
        found += tokenize(given)
    elif isinstance(given, list):
        if given and all(type(one) is int and 0 <= one < 2**63 for one in given):
            found += given
            return
        for one in given:
            _collect(one, tokenize, found)
    elif isinstance(given, dict):
        for name in ("role", "content", "text"):
            if name in given:
                _collect(given[name], tokenize, found)


def for_prompt(body: Mapping[str, Any]) -> bytes:
    """Return the body that makes a server compute only the prompt, and keep its KV for the decode server."""
    own = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    limits: dict[str, Any] = {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in own:
        limits["max_completion_tokens"] = 1
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return json.dumps({**own, **limits, "kv_transfer_params": params}).encode()


def for_answer(body: Mapping[str, Any], max_tokens: int | None, params: Any) -> bytes:
    """Return the body for the server that answers the client.

    `max_tokens` (None: unchanged) replaces the client's maximum number of output tokens; `params` (None: the prompt was
    not computed elsewhere) are the `kv_transfer_params` from the answer of the server that has the prompt's KV.
    """
    changed = dict(body)
    if max_tokens is not None:
        changed["max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"] = max_tokens
    if params is not None:
        changed["kv_transfer_params"] = params
    return json.dumps(changed).encode()
