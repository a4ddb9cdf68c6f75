"""Broken traces: each is an error that names file and line, what was found and what is allowed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vajra_py.errors import WorkloadError
from vajra_py.workload import (
    CsvLayout,
    MooncakeOptions,
    RequestSpec,
    Workload,
    read_agentic,
    read_azure,
    read_burstgpt,
    read_csv,
    read_jsonl,
    read_lengths,
    read_mooncake,
)

Reader = Callable[[Path], Workload]
READERS: dict[str, Reader] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "csv": read_csv,
    "lengths": lambda file: read_lengths(file, arrivals=lambda number: np.zeros(number)),
    "jsonl": read_jsonl,
    "mooncake": read_mooncake,
    "agentic": read_agentic,
}
CSV = "arrived_at,num_prompt_tokens,num_output_tokens"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46,374,44"
JSONL = {"request_id": "a", "arrived_at": 0.0, "num_prompt_tokens": 4, "num_output_tokens": 5}
MOONCAKE = {"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}
TURN = [0.0, 200, 10, 2.0, 0.0, None, 1, 0, [1, 3]]
HUGE = 10**400  # a whole number that no float can hold
AGENTIC = {"id": "x", "block_size": 64, "tool_tokens": 1, "system_tokens": 1, "requests": [TURN]}


def check(tmp_path: Path, reader: str, content: str | bytes, place: str, *words: str) -> None:
    """The reader's error stands at `file.x<place>`, has the words, and says what is allowed on the same single line."""
    file = tmp_path / "file.x"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(WorkloadError) as caught:
        READERS[reader](file)
    text = str(caught.value)
    assert text.startswith(f"{file}{place}: "), text
    assert "\n" not in text
    for word in words:
        assert word in text, text
    assert caught.value.problems[0].allowed
    assert caught.value.line == (int(place[1:]) if place else None)


@pytest.mark.parametrize("reader", sorted(READERS))
def test_an_empty_file(tmp_path: Path, reader: str) -> None:
    check(tmp_path, reader, "", "", "is empty")
    check(tmp_path, reader, "\n\n", "", "is empty")
    check(tmp_path, reader, gzip.compress(b""), "", "is empty")


@pytest.mark.parametrize("reader", sorted(READERS))
def test_a_file_that_is_not_there(tmp_path: Path, reader: str) -> None:
    for file in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(WorkloadError, match="cannot be read"):
            READERS[reader](file)


def test_a_header_alone(tmp_path: Path) -> None:
    check(tmp_path, "azure", AZURE + "\n", "", "is empty (a header without rows)")


def lines_of(reader: str, number: int) -> bytes:
    if reader == "jsonl":
        return b"".join(json.dumps({**JSONL, "request_id": str(i)}).encode() + b"\n" for i in range(number))
    if reader == "mooncake":
        return b"".join(json.dumps(MOONCAKE).encode() + b"\n" for _ in range(number))
    if reader == "agentic":
        return b"".join(json.dumps({**AGENTIC, "id": str(i)}).encode() + b"\n" for i in range(number))
    return AZURE.encode() + b"\n" + b"".join(ROW.encode() + b"\n" for _ in range(number))


@pytest.mark.parametrize("reader", ["azure", "jsonl", "mooncake", "agentic"])
def test_a_gzip_that_is_cut_short_or_damaged(tmp_path: Path, reader: str) -> None:
    packed = gzip.compress(lines_of(reader, 2000))
    file = tmp_path / "t.gz"
    file.write_bytes(packed[:-9])
    with pytest.raises(WorkloadError, match=r"t.gz:\d+: the gzip file is cut short.*A complete file") as caught:
        READERS[reader](file)
    assert caught.value.line is not None
    assert caught.value.line > 1000
    damaged = bytearray(packed)
    damaged[-6] ^= 0xFF  # its check sum
    file.write_bytes(bytes(damaged))
    with pytest.raises(WorkloadError, match=r"t.gz:\d+: the gzip file is damaged"):
        READERS[reader](file)
    file.write_bytes(packed[:2])
    with pytest.raises(WorkloadError, match=r"t.gz:1: the gzip file is cut short"):
        READERS[reader](file)


@pytest.mark.parametrize("reader", ["azure", "jsonl", "mooncake", "agentic"])
def test_bytes_that_are_no_text(tmp_path: Path, reader: str) -> None:
    lines = lines_of(reader, 40).split(b"\n")
    lines[30] = b"\xff\xfe" + lines[30]
    check(tmp_path, reader, b"\n".join(lines), ":31", "is not valid UTF-8 (byte 0xff")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    lines = lines_of("jsonl", 3).split(b"\n")
    lines[1] = lines[1].replace(b"{", rb'{"tenant": "a\ud800", ', 1)
    check(tmp_path, "jsonl", b"\n".join(lines), ":2", "has half of a surrogate pair")
    whole = lines[1].replace(rb"\ud800", rb"\ud83d\ude00")
    (tmp_path / "whole").write_bytes(b"\n".join([lines[0], whole, lines[2]]))
    assert [one.tenant for one in READERS["jsonl"](tmp_path / "whole")][1] == "a\U0001f600"
    with pytest.raises(WorkloadError, match="tenant has half of a surrogate pair"):
        Workload.from_requests([RequestSpec("r", 0.0, 3, 4, tenant="\ud800")])


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", ":1", ["has no column 'GeneratedTokens'"]),
        (
            "Timestamp,ContextTokens,GeneratedTokens\n" + ROW,
            ":1",
            ["has no column 'TIMESTAMP'", "Did you mean 'Timestamp'"],
        ),
        (f"{AZURE},TIMESTAMP\n{ROW},1", ":1", ["a column name appears twice ('TIMESTAMP')"]),
        (f"{AZURE}\n{ROW}\n2023-11-16 18:15:47,37\n", ":3", ["has 2 cells under a header of 3 columns"]),
        (f"{AZURE}\n{ROW}\n{ROW},9\n", ":3", ["has 4 cells under a header of 3 columns"]),
        (f"{AZURE}\n{ROW}\n\n{ROW}\nyesterday at noon o'clock,1,2\n", ":5", ["'TIMESTAMP'", "yesterday", "YYYY-MM-DD"]),
        (f"{AZURE}\n2023-13-16 18:15:46,1,2\n", ":2", ["'TIMESTAMP'"]),
        (f"{AZURE}\n9999-01-01 00:00:00,1,2\n", ":2", ["'TIMESTAMP'", "from 1970 to 2259"]),
        (f"{AZURE}\n2023-11-16 18:15:46+02:00,1,2\n", ":2", ["'TIMESTAMP'", "UTC"]),
        (f"{AZURE}\n,1,2\n", ":2", ["'TIMESTAMP' cannot be read ('')"]),
        (f"{AZURE}\n{ROW}\n2023-11-16 18:15:40,1,2\n", ":3", ["arrives before the row above it", "sort: true"]),
        (f'{AZURE}\n"2023-11-16 18:15:46,1,2\n', ":2", ["has 1 cells"]),
    ],
)
def test_a_broken_azure_trace(tmp_path: Path, text: str, place: str, words: list[str]) -> None:
    check(tmp_path, "azure", text, place, *words)


@pytest.mark.parametrize(
    "cell", ["-5", "0", "abc", "", "nan", "inf", "1.5", "1_0", "１", "9999999999", "1e400", "0x10"]
)
def test_a_number_of_tokens_that_is_none(tmp_path: Path, cell: str) -> None:
    rows = "\n".join([ROW] * 30)
    text = f"{AZURE}\n{rows}\n2023-11-16 18:15:46,7,{cell}\n{rows}\n"
    check(
        tmp_path,
        "azure",
        text,
        ":32",
        f"column 'GeneratedTokens' cannot be read ({cell!r})",
        "whole number of tokens >= 1",
    )
    text = f"{CSV}\n0,{cell},5\n"
    check(tmp_path, "csv", text, ":2", f"column 'num_prompt_tokens' cannot be read ({cell!r})")


@pytest.mark.parametrize("cell", ["-0.5", "abc", "", "nan", "inf", "1_0.0", "-inf"])
def test_a_time_that_is_none(tmp_path: Path, cell: str) -> None:
    check(
        tmp_path,
        "csv",
        f"{CSV}\n0,1,1\n{cell},1,1\n",
        ":3",
        f"'arrived_at' cannot be read ({cell!r})",
        ">= 0 (time in s)",
    )


def test_whole_numbers_may_be_written_as_decimals(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text(f"{CSV}\n0, 374.0,1e2\n")
    assert (read_csv(file)[0].num_prompt_tokens, read_csv(file)[0].num_output_tokens) == (374, 100)


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("ttft_slo_s", "-1", "seconds >= 0, or nothing"),
        ("priority", "high", "A whole number"),
        ("num_program_calls", "0", "A whole number >= 1, or nothing"),
        ("max_tokens", "0", "A whole number >= 1, or nothing"),
        ("follows", "zz", "follows a request that is not in the workload ('zz')"),
    ],
)
def test_an_optional_column_that_is_broken(tmp_path: Path, column: str, cell: str, words: str) -> None:
    check(tmp_path, "csv", f"{CSV},request_id,{column}\n0,1,1,a,{cell}\n", ":2", words)


def test_ids_and_followers_of_a_csv(tmp_path: Path) -> None:
    check(tmp_path, "csv", f"{CSV},request_id\n0,1,1,a\n0,1,1,a\n", ":3", "the id is empty or used before ('a')")
    text = f"{CSV},request_id,follows\n0,1,1,a,b\n1,1,1,b,\n"
    check(tmp_path, "csv", text, ":2", "follows a request that comes later ('b')")


@pytest.mark.parametrize(
    ("follows", "words"),
    [
        ("a;zz", "follows a request that is not in the workload ('zz')"),
        ("a;a", "follows a request twice ('a', 'a')"),
        ("a;d", "follows a request that comes later ('d')"),
        ("a;c", "waits for itself ('b' -> 'c' -> 'b', each follows the next)"),
        ("b", "waits for itself ('b' -> 'b', each follows the next)"),
    ],
)
def test_parents_that_cannot_be_waited_for(tmp_path: Path, follows: str, words: str) -> None:
    text = f"{CSV},request_id,follows\n0,1,1,a,\n1,1,1,b,{follows}\n1,1,1,c,b\n2,1,1,d,\n"
    check(tmp_path, "csv", text, ":3", words, "The id of an earlier request")
    parents = {"a": None, "b": follows.split(";") if ";" in follows else follows, "c": ["b"], "d": None}
    lines = [json.dumps(JSONL | {"request_id": name, "follows": value}) for name, value in parents.items()]
    check(tmp_path, "jsonl", "\n".join(lines), ":2", words, "The id of an earlier request")


def test_a_block_id_that_does_not_fit(tmp_path: Path) -> None:
    text = f"{CSV},prefix_block_ids_16\n0,20,1,{2**63 - 1}\n0,20,1,{2**63}\n"
    check(tmp_path, "lengths", text, ":3", f"('{2**63}')", "a whole number from 0 to 2**63 - 1")


def test_a_csv_without_the_needed_columns(tmp_path: Path) -> None:
    check(tmp_path, "csv", "a,b\n1,2\n", ":1", "has no column for arrived_at (a, b)", "arrival_s")
    check(tmp_path, "lengths", "prompt_tokens,b\n1,2\n", ":1", "has no column for num_output_tokens", "output_tokens")
    check(tmp_path, "burstgpt", f"{CSV}\n1,2,3\n", ":1", "has no column")


def test_a_trace_of_failures_only(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,0,490,API log\n"
    check(tmp_path, "burstgpt", text, "", "no row is left with a prompt and an output")
    file = tmp_path / "zero.csv"
    file.write_text(f"{CSV}\n0,1,0\n1,5,5\n")
    kept = read_csv(file, CsvLayout({}, drop_empty=True))
    assert [request.request_id for request in kept] == ["1"]
    assert kept.source["num_dropped_empty"] == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", ["is not valid JSON", "column 2"]),
        ("[1, 2]", ["is not a JSON object"]),
        ("[" * 100_000, ["is JSON nested too deeply"]),
        (
            json.dumps(JSONL | {"num_promt_tokens": 5}),
            ["unknown field ('num_promt_tokens')", "Did you mean 'num_prompt_tokens'"],
        ),
        (json.dumps({"request_id": "b"}), ["has no field 'arrived_at'"]),
        (json.dumps(JSONL | {"request_id": 5}), ["request_id cannot be used ('5')", "A string"]),
        (json.dumps(JSONL | {"arrived_at": "soon"}), ["arrived_at cannot be used"]),
        (json.dumps(JSONL | {"arrived_at": float("nan")}), ["arrived_at cannot be used ('nan')"]),
        (json.dumps(JSONL | {"arrived_at": True}), ["arrived_at cannot be used"]),
        (json.dumps(JSONL | {"arrived_at": HUGE}), ["arrived_at cannot be used ('1000"]),
        (json.dumps(JSONL).replace("0.0", "1" * 5000), ["has a number of too many digits"]),
        (json.dumps(JSONL | {"num_prompt_tokens": 4.5}), ["num_prompt_tokens cannot be used ('4.5')"]),
        (json.dumps(JSONL | {"num_output_tokens": 0}), ["num_output_tokens cannot be used", ">= 1"]),
        (json.dumps(JSONL | {"request_id": "b", "priority": None}), ["priority cannot be used ('None')"]),
        (
            json.dumps(JSONL | {"request_id": "b", "content": [["s", 3]]}),
            ["content describes 3 tokens of a prompt of 4"],
        ),
        (json.dumps(JSONL | {"request_id": "b", "content": "abc"}), ["content cannot be used"]),
        (json.dumps(JSONL | {"request_id": "b", "metadata": {"k": [1]}}), ["metadata cannot be used"]),
        (json.dumps(JSONL), ["request_id is empty or used before ('a')"]),
        (json.dumps(JSONL | {"request_id": "b", "follows": []}), ["follows cannot be used ('[]')", "a list of"]),
        (json.dumps(JSONL | {"request_id": "b", "follows": ["a", 1]}), ["follows cannot be used", "a list of"]),
        (
            json.dumps(JSONL | {"request_id": "b", "follows": "zz"}),
            ["follows a request that is not in the workload ('zz')"],
        ),
    ],
)
def test_a_broken_line_of_the_own_format(tmp_path: Path, line: str, words: list[str]) -> None:
    check(tmp_path, "jsonl", json.dumps(JSONL) + "\n\n" + line + "\n", ":3", *words)


def test_descending_times_of_the_own_format(tmp_path: Path) -> None:
    late = json.dumps(JSONL | {"request_id": "b", "arrived_at": 3})
    check(
        tmp_path, "jsonl", f"{late}\n{json.dumps(JSONL)}\n", ":2", "arrives before the request above it (0.0 after 3.0)"
    )
    assert [request.request_id for request in read_jsonl(tmp_path / "file.x", sort=True)] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": -1}, ["timestamp is not a time (-1)", "milliseconds >= 0"]),
        ({"timestamp": HUGE}, ["timestamp is not a time (1000"]),
        ({"timestamp": "x"}, ["timestamp is not a time ('x')"]),
        ({"timestamp": float("inf")}, ["timestamp is not a time (inf)"]),
        ({"input_length": 0}, ["input_length cannot be used (0)"]),
        ({"input_length": "513"}, ["input_length cannot be used ('513')"]),
        ({"output_length": -2}, ["output_length cannot be used (-2)"]),
        (
            {"hash_ids": [0]},
            ["hash_ids has 1 ids for a prompt of 513 tokens", "One id per started block of 512 tokens: 2"],
        ),
        ({"hash_ids": [0, "b"]}, ["hash_ids is not a list of ids"]),
        ({"hash_ids": None}, ["hash_ids is not a list of ids"]),
    ],
)
def test_a_broken_mooncake_line(tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    text = f"{json.dumps(MOONCAKE)}\n{json.dumps(MOONCAKE | change)}\n"
    check(tmp_path, "mooncake", text, ":2", *words)


def test_a_mooncake_line_without_a_field_or_out_of_order(tmp_path: Path) -> None:
    check(
        tmp_path, "mooncake", json.dumps({"timestamp": 0}), ":1", "has no field 'input_length' (timestamp)", "hash_ids"
    )
    late = json.dumps(MOONCAKE | {"timestamp": 9})
    check(
        tmp_path,
        "mooncake",
        f"{late}\n{json.dumps(MOONCAKE)}\n",
        ":2",
        "arrives before the line above it",
        "sort: true",
    )
    empty = json.dumps(MOONCAKE | {"output_length": 0})
    (tmp_path / "m").write_text(f"{late}\n{empty}\n")
    kept = read_mooncake(tmp_path / "m", MooncakeOptions(sort=True, drop_empty=True))
    assert (len(kept), kept.source["num_dropped_empty"]) == (1, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, ["block_size cannot be used (0)"]),
        ({"tool_tokens": -1}, ["tool_tokens cannot be used (-1)"]),
        ({"requests": []}, ["requests is not a list of requests"]),
        ({"requests": [TURN[:5]]}, ["request 0: is not a list of 9 values"]),
        ({"requests": [[-1.0, *TURN[1:]]]}, ["request 0: time cannot be used (-1.0)"]),
        ({"requests": [[HUGE, *TURN[1:]]]}, ["request 0: time cannot be used (1000"]),
        ({"requests": [[0.0, 2**31, *TURN[2:]]]}, ["request 0: tokens cannot be used (prompt 2147483648", "at most"]),
        ({"requests": [TURN, [-0.0, "200", *TURN[2:]]]}, ["request 1: tokens cannot be used (prompt '200'"]),
        ({"requests": [[*TURN[:8], [1]]]}, ["request 0: runs of block ids cannot be used"]),
        ({"requests": [[*TURN[:8], [1, 4]]]}, ["request 0: has 4 full blocks in a prompt of 200 tokens"]),
        ({"requests": [[5.0, *TURN[1:]], TURN]}, ["request 1: comes before the request above it"]),
        ({"id": "y"}, ["session id used before ('y')"]),
    ],
)
def test_a_broken_agentic_line(tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    text = f"{json.dumps(AGENTIC | {'id': 'y'})}\n{json.dumps(AGENTIC | change)}\n"
    check(tmp_path, "agentic", text, ":2", *words)


def test_an_agentic_file_without_a_field_or_with_too_few_sessions(tmp_path: Path) -> None:
    check(tmp_path, "agentic", json.dumps({"id": "x"}), ":1", "has no field 'block_size'")
    (tmp_path / "one").write_text(json.dumps(AGENTIC))
    with pytest.raises(WorkloadError, match=r"has 1 sessions \(2 requested\)"):
        read_agentic(tmp_path / "one", num_sessions=2)
