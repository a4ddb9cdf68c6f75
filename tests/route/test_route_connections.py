"""Connections to servers: answers of every form of HTTP/1.1, what is no answer, and when a connection serves again."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.route.route_harness import routing
from vajra_py.route.connections import Address, ConnectionPool, ServerFault

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
WITH_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Raw:
    """A server that sends these bytes in answer to each request, piece by piece."""

    def __init__(self, pieces: list[bytes], *, closes: bool = False) -> None:
        self.pieces = pieces
        self.closes = closes
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.has_sent = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                self.has_sent.set()
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(raw: Raw) -> AsyncIterator[tuple[ConnectionPool, Address]]:
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    pool = ConnectionPool(2.0)
    try:
        yield pool, Address.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base")
    finally:
        await pool.close()
        server.close()
        await server.wait_closed()


def run(raw_of: Callable[[], Raw], work: Callable[[Raw, ConnectionPool, Address], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        raw = raw_of()
        async with serving(raw) as (pool, address):
            await asyncio.wait_for(work(raw, pool, address), 20)

    asyncio.run(all_of_it())


async def ask(
    pool: ConnectionPool, address: Address, body: bytes = b"{}", limit_s: float = 20.0
) -> tuple[int, str, bytes]:
    head = [b"POST %s/x HTTP/1.1" % address.path, b"host: " + address.name, b"content-length: %d" % len(body)]
    answer = await (await pool.connect(address)).ask(head, body, limit_s)
    try:
        found = b""
        while piece := await answer.read():
            found += piece
        return answer.status, answer.content_type, found
    finally:
        answer.release()


@pytest.mark.parametrize(
    ("pieces", "closes", "body", "is_kept"),
    [
        ([WITH_LENGTH], False, b"hello", True),
        ([WITH_LENGTH[:9], WITH_LENGTH[9:-2], WITH_LENGTH[-2:]], False, b"hello", True),
        ([CHUNKED, b"3\r\nabc\r\n", b"2\r\n", b"de\r\n0\r\n", b"\r\n"], False, b"abcde", True),
        ([b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", WITH_LENGTH], False, b"hello", True),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], False, b"", True),
        ([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno"], True, b"no", False),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil ", b"the end"], True, b"until the end", False),
        ([b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nno"], True, b"no", False),
    ],
    ids=["length", "pieces", "chunks", "hints before", "no content", "close", "until closed", "1.0"],
)
def test_answers_of_every_form(pieces: list[bytes], closes: bool, body: bytes, is_kept: bool) -> None:
    async def work(raw: Raw, pool: ConnectionPool, address: Address) -> None:
        for number in range(3):
            status, _, found = await ask(pool, address, b"request %d" % number)
            assert (status // 100, found) == (2, body)
        assert raw.num_connections == (1 if is_kept else 3)
        assert raw.requests[2].startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert raw.requests[2].endswith(b"\r\n\r\nrequest 2")

    run(lambda: Raw(pieces, closes=closes), work)


@pytest.mark.parametrize(
    ("pieces", "closes", "says"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], False, "its answer is not HTTP that is read"),
        (
            [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nz"],
            False,
            "its answer is not HTTP that is read",
        ),
        ([CHUNKED, b"zz\r\n"], False, "its answer is not HTTP that is read"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000], False, "the head of its answer is larger than 65536 bytes"),
        ([], True, "its connection broke"),
        ([b"HTTP/1.1 200"], True, "its connection broke"),
        ([CHUNKED, b"3\r\nabc\r\n"], True, "its connection broke"),
        ([WITH_LENGTH[:-1]], True, "its connection broke"),
        ([CHUNKED], False, "it did not answer in time"),
    ],
    ids=[
        "another protocol",
        "upgrade",
        "no chunk",
        "head",
        "nothing",
        "half a head",
        "no last chunk",
        "too short",
        "silence",
    ],
)
def test_what_is_no_answer(pieces: list[bytes], closes: bool, says: str) -> None:
    async def work(raw: Raw, pool: ConnectionPool, address: Address) -> None:
        with pytest.raises(ServerFault, match=says) as raised:
            await ask(pool, address, limit_s=0.05 if "time" in says else 20.0)
        assert not raised.value.is_down
        raw.pieces, raw.closes = [WITH_LENGTH], False
        assert (await ask(pool, address))[2] == b"hello"
        assert raw.num_connections == 2

    run(lambda: Raw(pieces, closes=closes), work)


def test_nobody_listens() -> None:
    async def work() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        address = Address.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        server.close()
        await server.wait_closed()
        pool = ConnectionPool(2.0)
        with pytest.raises(ServerFault, match=r"it refuses connections \(Connection refused\)") as raised:
            await ask(pool, address)
        assert raised.value.is_down
        await pool.close()

    asyncio.run(work())


def test_a_shortage_of_the_router_is_no_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async def fails(*args: object, **more: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fails)
        with pytest.raises(ServerFault, match=r"the router cannot connect to it \(Too many open files\)") as raised:
            await ask(ConnectionPool(2.0), Address.of("http://127.0.0.1:8000"))
        assert not raised.value.is_down

    asyncio.run(work())


def test_a_name_that_no_host_can_have_is_refused_like_a_closed_port() -> None:
    async def work() -> None:
        with pytest.raises(ServerFault, match=r"it refuses connections \(") as raised:
            await ask(ConnectionPool(2.0), Address.of("http://127..0.1:8000"))
        assert raised.value.is_down

    asyncio.run(work())


def test_bytes_that_nobody_asked_for_end_a_connection() -> None:
    async def work(raw: Raw, pool: ConnectionPool, address: Address) -> None:
        for _ in range(2):
            assert (await ask(pool, address))[2] == b"hello"
        assert raw.num_connections == 2

    run(lambda: Raw([WITH_LENGTH + WITH_LENGTH]), work)


def test_an_answer_that_nobody_reads_is_not_read_without_end() -> None:
    async def work(raw: Raw, pool: ConnectionPool, address: Address) -> None:
        answer = await (await pool.connect(address)).ask(
            [b"POST / HTTP/1.1", b"host: x", b"content-length: 0"], b"", 20.0
        )
        (connection,) = pool.open
        while not connection.is_paused:
            await asyncio.sleep(0)
        assert not raw.has_sent.is_set()
        found = 0
        while piece := await answer.read():
            found += len(piece)
        assert found == 2**26
        answer.release()

    chunk = b"10000\r\n" + bytes(2**16) + b"\r\n"
    run(lambda: Raw([CHUNKED, *[chunk] * 2**10, b"0\r\n\r\n"]), work)


def test_the_end_of_a_stream_is_left_to_its_connection() -> None:
    async def work(raw: Raw, pool: ConnectionPool, address: Address) -> None:
        head = [b"POST / HTTP/1.1", b"host: x", b"content-length: 0"]
        answer = await (await pool.connect(address)).ask(head, b"", 20.0)
        assert await answer.read() == b"[DONE]"
        answer.release(is_at_end=True)
        await raw.has_sent.wait()
        while pool.num_idle == 0:
            await asyncio.sleep(0)
        raw.pieces = [WITH_LENGTH]
        assert (await ask(pool, address))[2] == b"hello"
        assert raw.num_connections == 1

    run(lambda: Raw([CHUNKED + b"6\r\n[DONE]\r\n", b"0\r\n", b"\r\n"]), work)


def test_a_router_has_descriptors_for_what_it_sends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2000, 2000))
    with routing(1, options={"max_concurrent": 700}) as (router, _):
        assert 1000 < router.connections.max_connections + 700 <= 2000 - 256
