"""Tokens of prompts as a router sees them: with a model's folder, those of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.route.route_harness import replayed, routing
from vajra_py.engine.tiny import train_tokenizer
from vajra_py.route.body import RouteBody, prompt_tokens, tokenizer_of

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Where are my blocks?"}]
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "are they?"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer().save_pretrained(folder)
    return folder


def tokens(where: Path | None, **body: Any) -> list[int]:
    return prompt_tokens(RouteBody.model_validate(body), tokenizer_of(None if where is None else str(where)))


def test_a_models_folder_gives_the_servers_tokens(folder: Path) -> None:
    own = tokenizer_of(str(folder))
    hub: Any = own
    text = "The blocks of a prompt"
    assert tokens(folder, prompt=text) == hub.encode(text)
    assert tokens(folder, prompt=text)[1:] == tokens(folder, prompt=text, add_special_tokens=False)
    assert tokens(folder, prompt=[7, 8, 9]) == [7, 8, 9]
    apply = hub._tokenizer.apply_chat_template
    assert tokens(folder, messages=MESSAGES) == apply(MESSAGES, add_generation_prompt=True, return_dict=False)
    unended = apply(MESSAGES, add_generation_prompt=False, return_dict=False)
    assert tokens(folder, messages=MESSAGES, add_generation_prompt=False) == unended
    joined = [{"role": "user", "content": "Where\nare they?"}]
    assert tokens(folder, messages=IN_PARTS) == apply(joined, add_generation_prompt=True, return_dict=False)


def test_a_tokenizer_alone_gives_the_tokens_of_texts(folder: Path) -> None:
    file = folder / "tokenizer.json"
    assert tokens(file, prompt="The blocks") == tokens(folder, prompt="The blocks")
    contents = [part for one in MESSAGES for part in (one["role"], one["content"])]
    plain = [one for text in contents for one in tokens(file, prompt=text, add_special_tokens=False)]
    assert tokens(file, messages=MESSAGES) == plain


@pytest.mark.parametrize(("most_together", "num_tokens"), [(100, 9), (9, 9), (7, 7), (4, 5), (-3, 5)])
def test_of_several_prompts_as_much_counts_as_a_server_has_room_for_but_the_longest_in_full(
    most_together: int, num_tokens: int
) -> None:
    for prompts in (["abcd" * 3, "abcd" * 5, "abcd"], [[1] * 3, [2] * 5, [3]]):
        body = RouteBody.model_validate({"prompt": prompts})
        assert len(prompt_tokens(body, tokenizer_of(None), most_together)) == num_tokens


def test_several_prompts_together_may_be_longer_than_one_may_be(tmp_path: Path) -> None:
    replica = {"max_model_len": 64, "memory": {"num_blocks": 8, "block_size": 16}}
    with routing(1, tmp_path / "run", replica=replica) as (router, fakes):
        for prompt, status in (("word" * 100, 400), (["word" * 50] * 8, 200), (["word", "word" * 100], 400)):
            body = {"model": "m", "prompt": prompt, "max_tokens": 4}
            assert router.client.post("/v1/completions", json=body).status_code == status
        assert [one["prompt"] for one in fakes[0].bodies] == [["word" * 50] * 8]
    assert replayed(tmp_path / "run").is_equal


@pytest.mark.parametrize(
    "given", [3, [], ["x"], [{"role": "user"}], [{"content": [{"type": "image_url"}]}], [{"content": 3}]]
)
def test_what_is_no_conversation_is_the_servers_to_refuse(folder: Path, given: Any) -> None:
    assert tokens(folder, messages=given)
    assert tokens(None, messages=given)
