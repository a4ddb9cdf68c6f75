"""Bodies and prompts are read within bounds, whatever is in them."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.serve.api.reading import parsed
from vajra_py.serve.api.schema import ChatBody, CompletionBody, GenerationBody
from vajra_py.serve.api.tokenizing import SHORT_TEXT, Tokenizing
from vajra_py.serve.http.body_scan import JsonLimits, check_structure
from vajra_py.serve.http.errors import ApiError
from vajra_py.serve.http.options import ServeOptions

MOST = 8 * 2**20 - 200
HEAD = b'{"model":"puppet",'


def filled(kind: str, before: bytes, element: bytes, after: bytes) -> tuple[str, bytes]:
    count = (MOST - len(HEAD) - len(before) - len(after)) // (len(element) + 1)
    return kind, HEAD + before + b",".join([element] * count) + after


HOSTILE = [
    filled("completions", b'"prompt":[', b"-1", b"]}"),
    filled("completions", b'"prompt":[', b"[]", b"]}"),
    filled("completions", b'"prompt":[', b'""', b"]}"),
    filled("completions", b'"prompt":[[', b"1.5", b"]]}"),
    filled("completions", b'"prompt":[', b"9" * 5000, b"]}"),
    ("completions", HEAD + b'"prompt":' + b"[" * MOST),
    ("completions", HEAD + b'"prompt":"' + b'\\"' * (MOST // 2) + b'"}'),
    filled("chat/completions", b'"messages":[', b"{}", b"]}"),
    filled("chat/completions", b'"messages":[', b'{"role":"user","content":"a"}', b"]}"),
    filled("chat/completions", b'"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    filled("chat/completions", b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"),
    ("completions", HEAD + b",".join(b'"%d":1' % number for number in range(400_000)) + b"}"),
    ("completions", HEAD + b'"prompt":[1],"metadata":{' + b",".join(b'"%d":1' % n for n in range(400_000)) + b"}}"),
    ("completions", HEAD + b'"prompt":[1],"logit_bias":{' + b",".join(b'"%d":"" ' % n for n in range(400_000)) + b"}}"),
    ("completions", HEAD + b'"prompt":[' + b"-1," * 400_000 + b"1]}"),
    ("completions", HEAD + b'"prompt":[' + b"1," * 400_000 + b"-1]}"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_any_body_of_8_mib_is_refused_in_few_words(number: int, puppet_server: Callable[..., Any]) -> None:
    kind, content = HOSTILE[number]
    assert len(content) <= 8 * 2**20
    server = puppet_server()
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/{kind}", content=content, headers=headers, timeout=60)
    assert response.status_code == 400
    assert len(response.content) < 1500
    assert server.service.session.controller.num_submitted == 0
    assert server.post().status_code == 200


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_refusing_a_body_builds_little_of_it(number: int) -> None:
    kind, content = HOSTILE[number]
    options = ServeOptions()
    limits = JsonLimits(options.max_body_values, options.max_body_containers)
    body: type[GenerationBody] = ChatBody if kind.startswith("chat") else CompletionBody
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            parsed(bytearray(content), body, limits)
        raised = False
    except BaseException:  # a prompt of quotes is refused where the model has no tokenizer, and not here
        raised = True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert raised is (number == 6)
    assert peak < 90 * 2**20


def test_a_number_of_5000_digits_is_no_fault_of_the_server(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    content = HEAD + b'"prompt":[1],"seed":' + b"9" * 5000 + b"}"
    response = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=12) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


def facts_of(value: Any) -> tuple[int, int, int]:
    """(values, containers, levels) of JSON."""
    if not isinstance(value, list | dict):
        return 1, 0, 0
    inner = [facts_of(one) for one in (value if isinstance(value, list) else value.values())]
    return (
        1 + sum(one[0] for one in inner),
        1 + sum(one[1] for one in inner),
        1 + max((one[2] for one in inner), default=0),
    )


@given(value=JSON, ascii_only=st.booleans(), piece=st.integers(1, 9))
def test_the_scan_counts_what_a_parser_builds(value: Any, ascii_only: bool, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    values, containers, levels = facts_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vajra_py.serve.http.body_scan._PIECE", piece)
        # an empty array counts as one value more than it has
        check_structure(text, JsonLimits(values + containers, containers, levels))
        for limits, what in (
            (JsonLimits(values - 1, 1000, 1000), "values"),
            (JsonLimits(1000, containers - 1, 1000), "arrays and objects"),
            (JsonLimits(1000, 1000, levels - 1), "nested"),
        ):
            if what == "values" or containers:
                with pytest.raises(ApiError, match=what):
                    check_structure(text, limits)


class Letters:
    """A tokenizer of letters that keeps what it was asked."""

    stripped_blanks = None

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        self.seen.append(text)
        return [ord(one) for one in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]

    def piece(self, token_id: int) -> bytes | None:
        return chr(token_id).encode()

    def render_chat(self, messages: Any) -> str:
        raise NotImplementedError


def test_a_prompt_that_cannot_fit_is_not_tokenized_whole() -> None:
    tokenizer, tokenizing = Letters(), Tokenizing()

    async def ask() -> None:
        await tokenizing.tokens(tokenizer, "a" * 2**23, 1000, param="prompt", is_rendered=False)

    with pytest.raises(ApiError, match="Allowed: up to 999 tokens") as error:
        asyncio.run(ask())
    tokenizing.close()
    assert error.value.code == "context_length_exceeded"
    assert sum(map(len, tokenizer.seen)) < 2**15


def test_prompts_take_turns_and_one_that_fits_is_tokenized_as_it_stands() -> None:
    tokenizer, tokenizing = Letters(), Tokenizing()

    async def ask() -> list[list[int]]:
        texts = ("a" * 100_000, "b" * 100_000, "c" * (SHORT_TEXT + 1))
        return await asyncio.gather(
            *(
                tokenizing.tokens(tokenizer, text, most, param="prompt", is_rendered=False)
                for text, most in zip(texts, (90_000, 200_000, 9_999), strict=True)
            ),
            return_exceptions=True,
        )  # type: ignore[return-value]

    found = asyncio.run(ask())
    tokenizing.close()
    assert isinstance(found[0], ApiError)
    assert found[1] == [ord("b")] * 100_000
    assert found[2] == [ord("c")] * (SHORT_TEXT + 1)
    order = [one[0] for one in tokenizer.seen]
    assert order[:3] == ["a", "b", "c"]  # and not all of the first prompt's pieces before


def test_large_bodies_have_a_common_limit(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_buffered_bytes=2**17)
    refused = server.post(prompt=[1] * 100_000)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert server.post(prompt=[1] * 40_000).json()["error"]["code"] == "context_length_exceeded"
    assert server.post().status_code == 200
    assert server.service.bodies._num_bytes == 0
