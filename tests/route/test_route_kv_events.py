"""KV events of servers: what a router knows of their caches, where it sends prompts by that, and what it does without."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.route.publisher import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, Publisher, chain
from tests.route.route_harness import REGISTRY, FakeServer, LoopThread, Router, replayed, system
from tests.route.test_route import ask, until
from tests.route.test_route_core import PRECISE
from vajra_py.config import system_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.route.kv_events import ServerBlocks
from vajra_py.route.session import Place, RouteSession
from vajra_py.runtime.kv.block_hashes import TokenBlockHashes, adapter_salt
from vajra_py.runtime.records.input_log import INPUTS_FILE, CacheReport, read_inputs

SIZE = 16
FIRST, SECOND = list(range(64)), list(range(100, 164))


def batch(*events: Any) -> Any:
    """A batch as it is after decoding."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.0, list(events), 0)))


def held(tokens: Sequence[int], salt: str = "") -> list[str]:
    hashes = TokenBlockHashes(tokens, SIZE, salt)
    return [one.hex() for one in hashes.block_hashes(0, len(tokens) // SIZE) if isinstance(one, bytes)]


def blocks_of(*events: Any) -> ServerBlocks:
    blocks = ServerBlocks(SIZE, 1000)
    blocks.apply(batch(*events))
    return blocks


def test_blocks_are_known_by_their_tokens_whatever_a_server_calls_them() -> None:
    event = chain(FIRST)
    rest = BlockStored([b"digest"], event.block_hashes[-1], SECOND[:SIZE], SIZE)
    blocks = blocks_of(event, rest)
    assert blocks.news() == (held(FIRST + SECOND[:SIZE]), [])
    blocks.apply(batch(BlockRemoved([event.block_hashes[3], b"digest", "strange"]), BlockRemoved([99])))  # type: ignore[list-item]
    assert blocks.news() == ([], held(FIRST + SECOND[:SIZE])[3:])
    blocks.apply(batch(chain(FIRST, seed=1), AllBlocksCleared(), chain(SECOND)))
    assert blocks.news() == (held(SECOND), held(FIRST)[:3])


def test_events_may_be_arrays() -> None:
    blocks = ServerBlocks(SIZE, 1000)
    blocks.apply([1.0, [["BlockStored", [1, 2], None, FIRST[:32], SIZE, None, "GPU"], ["NewKind", 1]]])
    assert blocks.news() == (held(FIRST[:32]), [])
    blocks.apply([1.0, [["BlockRemoved", [2], "GPU"]], 0])
    assert blocks.news() == ([], held(FIRST[:32])[1:])
    blocks.apply([1.0, [["AllBlocksCleared"]]])
    assert blocks.content == []


def test_salts_and_adapters_keep_content_apart() -> None:
    salted = chain(FIRST, extra_keys=[("tenant",), None, None, None])
    assert blocks_of(salted).content == held(FIRST, "tenant")
    adapted = chain(FIRST, lora_name="sql", extra_keys=[("sql", "tenant"), ("sql",), ("sql",), ("sql",)])
    assert blocks_of(adapted).content == held(FIRST, adapter_salt("tenant", "sql"))


@pytest.mark.parametrize(
    "event",
    [
        chain(FIRST, medium="CPU"),
        chain(FIRST, kv_cache_spec_kind="sliding_window"),
        chain(FIRST, extra_keys=[None, (("image", 3),), (("image", 3),), None]),
        chain(FIRST, block_size=32),
        BlockStored([1], 77, FIRST[:SIZE], SIZE),
    ],
    ids=["another memory", "a window", "an image", "another block size", "an unknown parent"],
)
def test_what_cannot_be_matched_is_left_out(event: BlockStored) -> None:
    assert blocks_of(event).content == []


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        [1.0],
        [1.0, 3],
        [1.0, [3]],
        [1.0, [{"type": "BlockStored"}]],
        [1.0, [["BlockStored", [1], None, "x", SIZE]]],
    ],
)
def test_what_is_no_batch_is_an_error(given: Any) -> None:
    with pytest.raises(ValueError, match=r"batch|event|without"):
        ServerBlocks(SIZE, 1000).apply(given)


def test_a_server_cannot_fill_the_memory() -> None:
    blocks = ServerBlocks(SIZE, 6)
    blocks.apply(batch(chain(FIRST)))
    with pytest.raises(ValueError, match="more than 6 blocks"):
        blocks.apply(batch(chain(SECOND)))


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "clear", "news"]), st.integers(0, 5), st.integers(0, 1))))
def test_news_add_up_to_the_content(steps: list[tuple[str, int, int]]) -> None:
    """A block of two groups of layers is held while one of them has it."""
    blocks, named, known = ServerBlocks(SIZE, 1000), set(), set()
    for what, number, group in steps:
        tokens = [number] * SIZE
        if what == "store":
            blocks.apply(batch(chain(tokens, group_idx=group)))
            named.add((number, group))
        elif what == "remove":
            blocks.apply(batch(BlockRemoved(chain(tokens).block_hashes, group_idx=group)))
            named.discard((number, group))
        elif what == "clear":
            blocks.apply(batch(AllBlocksCleared()))
            named.clear()
        else:
            stored, removed = blocks.news()
            assert not known & set(stored)
            assert known >= set(removed)
            known = known - set(removed) | set(stored)
            assert known == set(blocks.content) == {one for number, _ in named for one in held([number] * SIZE)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer that knows numbers."""
    made = Tokenizer(WordLevel({str(one): one for one in range(200)} | {"?": 200}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@contextmanager
def routing(
    tokenizer: str, publishers: Sequence[Publisher | None], save_run: Path | None = None, **route: Any
) -> Iterator[Router]:
    """A router in front of as many fakes, by a router that asks what they hold."""
    with ExitStack() as stack:
        thread = LoopThread()
        stack.callback(thread.close)
        fakes = [FakeServer(thread) for _ in publishers]
        servers: list[dict[str, Any]] = [{"url": one.url} for one in fakes]
        for server, fake, publisher in zip(servers, fakes, publishers, strict=True):
            stack.callback(fake.kill)
            if publisher is not None:
                server["kv_events"] = publisher.settings()
        router = Router(system(servers, {"tokenizer": tokenizer, **route}, scheduling=PRECISE), save_run)
        stack.callback(router.close)
        yield router


def reported(router: Router, replica_id: int) -> list[str] | None:
    memory: Any = router.session.controller.replicasets["default"].replicas[replica_id].memory
    return None if memory.reported is None else [one.hex() for one in list(memory.reported)]


def place(router: Router, prompt: Any, **more: Any) -> str:
    answer = ask(router, prompt, **more)
    assert answer.status_code == 200
    return str(answer.headers["x-vajra-server"])


@pytest.fixture
def two() -> Iterator[list[Publisher]]:
    publishers = [Publisher(), Publisher()]
    yield publishers
    for one in publishers:
        one.close()


def test_prompts_go_where_their_prefix_is(tmp_path: Path, tokenizer: str, two: list[Publisher]) -> None:
    two[1].publish(chain(FIRST, seed=1))  # before the router starts
    two[0].publish(chain(SECOND, seed=2))
    with routing(tokenizer, two, tmp_path / "run") as router:
        until(lambda: [reported(router, one) for one in (0, 1)] == [held(SECOND), held(FIRST)])
        assert router.client.get("/health").json()["servers"]["default/1"]["kv_events"] is True
        assert [place(router, one) for one in (FIRST, SECOND, FIRST)] == ["default/1", "default/0", "default/1"]
        assert place(router, " ".join(map(str, FIRST))) == "default/1"
        two[1].publish(BlockRemoved(chain(FIRST, seed=1).block_hashes))
        two[0].publish(chain(FIRST, seed=2))
        until(lambda: reported(router, 1) == [] and len(reported(router, 0) or ()) == 8)
        assert place(router, FIRST) == "default/0"
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference
    kinds = [type(one) for one in read_inputs(tmp_path / "run" / INPUTS_FILE)]
    assert kinds.count(CacheReport) >= 4


def test_prompts_of_an_adapter_go_where_its_own_content_is(
    tmp_path: Path, tokenizer: str, two: list[Publisher]
) -> None:
    two[0].publish(chain(FIRST))
    two[1].publish(chain(FIRST, lora_name="sql", extra_keys=[("sql",)] * 4))
    with routing(tokenizer, two, tmp_path / "run", adapters=["sql"]) as router:
        until(lambda: reported(router, 0) and reported(router, 1))
        placed = [place(router, FIRST, model=model) for model in ("sql", "m", "sql", "m")]
        assert placed == ["default/1", "default/0"] * 2
    assert replayed(tmp_path / "run").is_equal


def test_missed_batches_are_replayed(tokenizer: str, two: list[Publisher]) -> None:
    with routing(tokenizer, [two[0], None]) as router:
        until(lambda: reported(router, 0) == [])
        two[0].publish(chain(FIRST))
        until(lambda: reported(router, 0) == held(FIRST))
        two[0].publish(BlockRemoved(chain(FIRST).block_hashes[2:]), is_lost=True)
        two[0].publish(chain(SECOND), is_lost=True)
        two[0].publish()
        until(lambda: reported(router, 0) == [*held(FIRST)[:2], *held(SECOND)])


@pytest.mark.parametrize("keeps", [None, 1], ids=["no replay socket", "too few are kept"])
def test_what_is_known_is_void_where_missed_batches_are_gone(tokenizer: str, keeps: int | None) -> None:
    publisher = Publisher(keeps=keeps)
    with routing(tokenizer, [publisher]) as router:
        publisher.wait_for_subscriber()
        until(lambda: reported(router, 0) == [])
        publisher.publish(chain(FIRST))
        until(lambda: reported(router, 0) == held(FIRST))
        publisher.publish(is_lost=True)
        publisher.publish(chain(SECOND))
        until(lambda: reported(router, 0) == held(SECOND))
        publisher.publish_bytes(b"\xc1")
        until(lambda: reported(router, 0) == [])
    publisher.close()


def test_a_publisher_that_dies_harms_nothing_and_may_come_back(tmp_path: Path, tokenizer: str) -> None:
    publisher = Publisher()
    publisher.publish(chain(FIRST))
    publisher.publish(chain(SECOND))
    with routing(tokenizer, [None, publisher], tmp_path / "run") as router:
        until(lambda: reported(router, 1) == held(FIRST) + held(SECOND))
        assert place(router, FIRST) == "default/1"
        publisher.close()
        until(lambda: reported(router, 1) is None)
        assert place(router, FIRST) == "default/1"  # prompts that were sent there count as its cached content again
        assert place(router, SECOND) in ("default/0", "default/1")
        publisher = Publisher(port=publisher.port, replay_port=publisher.replay_port)
        publisher.publish(chain(SECOND))
        until(lambda: reported(router, 1) == held(SECOND))
        assert place(router, SECOND) == "default/1"
    publisher.close()
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference


def test_a_server_that_comes_up_again_tells_anew(tokenizer: str, two: list[Publisher]) -> None:
    two[0].publish(chain(FIRST))
    with routing(tokenizer, [two[0], None]) as router:
        until(lambda: reported(router, 0) == held(FIRST))
        loop = router._server._event_loop
        assert loop is not None
        place = Place("default", 0, router.session.status()["default/0"]["url"], False)
        known_then: list[Any] = []

        def lose() -> None:
            router.session.lose(place, "for a test")
            known_then.append(reported(router, 0))

        loop.call_soon_threadsafe(lose)
        until(lambda: known_then and reported(router, 0) == held(FIRST))
        assert known_then == [None]


def mistake(change: dict[str, Any], route: dict[str, Any], tokenizer: str | None) -> str:
    servers = [{"url": "http://x", "kv_events": {"endpoint": "tcp://127.0.0.1:5557", **route}}]
    with pytest.raises(ConfigError) as raised:
        RouteSession(
            system_from_mapping(system(servers, {"tokenizer": tokenizer}, **change), registry=REGISTRY), REGISTRY
        )
    return str(raised.value)


def test_mistakes_of_a_file_are_named(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tokenizer: is needed for KV events" in mistake({}, {}, None)
    assert "is not an address to connect to" in mistake({}, {"endpoint": "tcp://*:5557"}, tokenizer)
    assert "is not an address to connect to" in mistake({}, {"replay_endpoint": "5558"}, tokenizer)
    memory = {"num_blocks": 64, "block_size": 16, "tenant_salt": True}
    assert "tenant_salt: is unknown to the servers" in mistake({"replica": {"memory": memory}}, {}, tokenizer)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "vajra_py.route.subscription", raising=False)
    assert 'pip install "vajra-py[kv-events]"' in mistake({}, {}, tokenizer)
