"""Requests as a router reads them: what decides where they go. Everything else is the server's to check."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, create_model

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
    **body_fields(),
)
"""Fields of a body by which policies decide."""

BYTES_PER_TOKEN = 4
"""Bytes of text that count as a token where there is no tokenizer."""
Tokenize = Callable[[str], Sequence[int]]


def by_bytes(text: str) -> Sequence[int]:
    """Return a number for each four bytes of a text: as many as it has tokens, about, and equal where prefixes are."""
    raw = text.encode("utf-8", "replace")
    raw += bytes(-len(raw) % BYTES_PER_TOKEN)
    return cast("list[int]", np.frombuffer(raw, "<u4").tolist())


def tokenizer_of(path: str | None) -> Tokenize:
    """Return the function that counts prompts. Raises `OSError` or `ValueError` when the file is no tokenizer's."""
    if path is None:
        return by_bytes
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(str(error)) from None
    return lambda text: found.encode(text, add_special_tokens=False).ids


def prompt_tokens(body: BaseModel, tokenize: Tokenize) -> list[int]:
    """Return the tokens of a prompt, as far as a router knows them; of several prompts, one after the other."""
    given = getattr(body, "messages", None)
    if given is None:
        given = getattr(body, "prompt", None)
    found: list[int] = []
    _collect(given, tokenize, found)
    return found or [0]


def _collect(given: Any, tokenize: Tokenize, found: list[int]) -> None:
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
    """Return the body by which a server computes a prompt alone, and keeps its KV for another one."""
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


def with_kv(body: Mapping[str, Any], params: Any) -> bytes:
    """Return the body by which a server goes on with a prompt whose KV another one has."""
    return json.dumps({**body, "kv_transfer_params": params}).encode()
