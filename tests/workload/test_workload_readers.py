"""Reading the traces of the field, and this project's own format."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vajra_py.errors import WorkloadError
from vajra_py.workload import (
    CsvLayout,
    MooncakeOptions,
    PromptContent,
    RequestSpec,
    Workload,
    read_agentic,
    read_azure,
    read_burstgpt,
    read_csv,
    read_jsonl,
    read_lengths,
    read_mooncake,
    write_jsonl,
)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-17 00:00:00,1,2"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,276,693,API log\n"
    "119,GPT-4,417,0,417,API log\n"
)


def written(tmp_path: Path, text: str, name: str = "trace.csv", *, packed: bool = False) -> Path:
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return file


def times(workload: Workload) -> list[float]:
    return [request.arrived_at for request in workload]


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in workload]


@pytest.mark.parametrize("packed", [False, True])
def test_azure_starts_its_clock_at_the_first_request(tmp_path: Path, packed: bool) -> None:
    file = written(tmp_path, AZURE, packed=packed)  # gzip is detected by content: both names end in .csv
    workload = read_azure(file)
    assert times(workload) == pytest.approx([0.0, 4.314579, 20653.31941], abs=1e-9)
    assert lengths(workload) == [(374, 44), (396, 109), (1, 2)]
    assert workload.name == "trace"
    assert workload.source["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert workload.source["file"] == "trace.csv"


def test_azure_2024_writes_a_time_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2,6\n"
    assert times(read_azure(written(tmp_path, text))) == pytest.approx([0.0, 0.99007])


def test_a_byte_order_mark_and_blank_lines_are_no_matter(tmp_path: Path) -> None:
    text = "\ufeff" + AZURE.replace("\r\n2023-11-17", "\r\n\r\n \r\n2023-11-17") + "\r\n\r\n"
    assert len(read_azure(written(tmp_path, text))) == 3


def test_sorting_keeps_the_row_numbers_as_ids(tmp_path: Path) -> None:
    head, first, second, third = AZURE.splitlines()
    file = written(tmp_path, "\n".join([head, third, first, second]))
    with pytest.raises(WorkloadError, match=r"trace.csv:3: arrives before the row above it.*sort: true"):
        read_azure(file)
    workload = read_azure(file, sort=True)
    assert [request.request_id for request in workload] == ["1", "2", "0"]
    assert times(workload)[0] == 0.0


def test_burstgpt_leaves_failures_out_and_counts_them(tmp_path: Path) -> None:
    file = written(tmp_path, BURSTGPT)
    workload = read_burstgpt(file)
    assert times(workload) == [0.0, 40.0, 113.0]
    assert workload.source["num_dropped_empty"] == 1
    assert dict(workload[2].metadata) == {"Model": "GPT-4", "Log Type": "API log"}
    with pytest.raises(WorkloadError, match=r"trace.csv:5: column 'Response tokens' cannot be read \('0'\)"):
        read_burstgpt(file, drop_empty=False)


def test_burstgpt_can_be_filtered(tmp_path: Path) -> None:
    file = written(tmp_path, BURSTGPT)
    assert lengths(read_burstgpt(file, model="GPT-4")) == [(417, 276)]
    assert len(read_burstgpt(file, log_type="Conversation log")) == 2
    with pytest.raises(WorkloadError, match=r"no row is left with Model 'GPT4'.*Did you mean 'GPT-4'"):
        read_burstgpt(file, model="GPT4")


def test_a_plain_csv_needs_no_mapping(tmp_path: Path) -> None:
    text = (
        "request_id,arrived_at,num_prompt_tokens,num_output_tokens,priority,tenant,ttft_slo_s,follows,think_time_s,extra\n"
        "a,0.5,10,20,1,x,0.25,,,e\n"
        "b,1.5,11,21,-1,y,,a,2.5,f\n"
    )
    first, second = read_csv(written(tmp_path, text))
    assert first == RequestSpec("a", 0.5, 10, 20, priority=1, tenant="x", ttft_slo_s=0.25)
    assert second == RequestSpec("b", 1.5, 11, 21, priority=-1, tenant="y", follows="a", think_time_s=2.5)


def test_columns_can_be_mapped_and_units_told(tmp_path: Path) -> None:
    file = written(tmp_path, "when,in,out,who\n0,5,6,me\n1500,7,8,you\n")
    columns = {"arrived_at": "when", "num_prompt_tokens": "in", "num_output_tokens": "out"}
    workload = read_csv(file, CsvLayout(columns, time_unit="ms", metadata=["who"]))
    assert times(workload) == [0.0, 1.5]
    assert [dict(request.metadata) for request in workload] == [{"who": "me"}, {"who": "you"}]
    with pytest.raises(WorkloadError, match=r"no such field to map a column to.*Did you mean 'priority'"):
        read_csv(file, CsvLayout({**columns, "priorty": "who"}))
    with pytest.raises(WorkloadError, match="has no column 'nobody'"):
        read_csv(file, CsvLayout({**columns, "tenant": "nobody"}))


def test_lengths_take_arrivals_from_outside_or_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "prompt_tokens,output_tokens\n1,10\n2,20\n3,30\n")
    workload = read_lengths(file, arrivals=lambda number: np.arange(number) * 2.0, num_requests=2)
    assert (times(workload), lengths(workload)) == ([0.0, 2.0], [(1, 10), (2, 20)])
    drawn = read_lengths(
        file, arrivals=lambda number: np.arange(number) * 1.0, num_requests=500, sample=np.random.default_rng(0)
    )
    assert set(lengths(drawn)) == {(1, 10), (2, 20), (3, 30)}
    assert len({request.request_id for request in drawn}) == 500
    with pytest.raises(WorkloadError, match=r"has no column for arrived_at.*Give `arrivals`"):
        read_lengths(file)
    with pytest.raises(WorkloadError, match=r"has 3 rows of lengths \(4 requested\)"):
        read_lengths(file, arrivals=lambda number: np.zeros(number), num_requests=4)


def test_lengths_with_blocks_share_prefixes(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens,prefix_block_ids_16\n0,40,1,1 2\n1,36,1,1 2\n2,16,1,1\n3,5,1,\n"
    one, two, three, four = (request.content for request in read_lengths(written(tmp_path, text)))
    assert one is not None
    assert two is not None
    assert three is not None
    assert four is not None
    assert one.segments == ((1, 16), (2, 16), (("rest", 0), 8))
    assert one.shared_prefix_tokens(two) == 32
    assert three.segments == ((1, 16),)
    assert four.num_tokens == 5
    broken = written(tmp_path, "arrival_s,input_tokens,output_tokens,prefix_block_ids_16\n0,20,1,1 2\n", "b.csv")
    with pytest.raises(WorkloadError, match=r"b.csv:2: .*does not list the full blocks of a prompt of 20 tokens"):
        read_lengths(broken)
    with pytest.raises(WorkloadError, match=r"sample: prompts share prefixes \(prefix_block_ids_16\)"):
        read_lengths(tmp_path / "trace.csv", arrivals=lambda n: np.zeros(n), sample=np.random.default_rng(0))


def mooncake_line(stamp: float, prompt: int, output: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": stamp, "input_length": prompt, "output_length": output, "hash_ids": ids}) + "\n"


def test_mooncake_blocks_become_segments(tmp_path: Path) -> None:
    text = mooncake_line(3000, 1100, 5, [0, 7, 9]) + "\n" + mooncake_line(6000, 1024, 6, [0, 7])
    workload = read_mooncake(written(tmp_path, text, "m.jsonl"))
    one, two = workload
    assert times(workload) == [0.0, 3.0]
    assert one.content == PromptContent(((0, 512), (7, 512), (9, 76)))
    assert two.content == PromptContent(((0, 512), (7, 512)))
    assert workload.statistics().prefix_share_fraction == pytest.approx(1024 / 2124)


def test_mooncake_ticks_can_be_spread(tmp_path: Path) -> None:
    file = written(tmp_path, "".join(mooncake_line(3000 * (i // 50), 10, 1, [i]) for i in range(100)), "m.jsonl")
    spread = read_mooncake(file, MooncakeOptions(tick_s=3.0), np.random.default_rng(1))
    assert len(set(times(spread))) == 100
    assert sorted(times(spread)) == times(spread)
    assert {int(t // 3) for t in times(spread)} == {0, 1}
    with pytest.raises(ValueError, match="needs a random generator"):
        read_mooncake(file, MooncakeOptions(tick_s=3.0))


def agentic_line(session_id: str, requests: list[object], **changes: object) -> str:
    record = {"id": session_id, "block_size": 64, "tool_tokens": 100, "system_tokens": 20, "requests": requests}
    return json.dumps(record | changes) + "\n"


def test_agentic_sessions_share_tools_and_their_own_past(tmp_path: Path) -> None:
    turns = [
        [0.0, 200, 10, 2.0, 0.0, None, 1, 0, [1, 3]],
        [9.0, 330, 0, 1.0, 7.0, None, 0, 3, [1, 5]],
        [20.0, 400, 12, None, None, None, 0, 3, [1, 3, 9, 3]],
    ]
    text = agentic_line("x", turns) + agentic_line("y", [[0.0, 190, 5, 1.0, 0.0, None, 1, 0, [1, 2]]], system_tokens=30)
    workload = read_agentic(written(tmp_path, text, "s.jsonl"), lambda number: np.arange(number) * 5.0)
    first, other, third = workload
    assert (first.session_id, other.session_id, third.session_id) == ("x", "y", "x")
    assert (first.arrived_at, other.arrived_at, third.arrived_at) == (0.0, 5.0, 20.0)
    assert workload.source["num_dropped_empty"] == 1
    assert (third.follows, third.think_time_s) == (first.request_id, 10.0)
    assert first.content is not None
    assert other.content is not None
    assert third.content is not None
    assert first.content.num_tokens == 200
    assert first.content.shared_prefix_tokens(third.content) == 192
    assert first.content.shared_prefix_tokens(other.content) == 100
    opened = read_agentic(tmp_path / "s.jsonl", mode="open", num_sessions=1)
    assert [(r.arrived_at, r.follows) for r in opened] == [(0.0, None), (20.0, None)]


specs = st.builds(
    RequestSpec,
    request_id=st.text(min_size=1, max_size=5),
    arrived_at=st.floats(0, 1e9),
    num_prompt_tokens=st.just(3),
    num_output_tokens=st.integers(1, 2**31 - 1),
    max_tokens=st.none() | st.integers(1, 100),
    priority=st.integers(-(2**63), 2**63 - 1),
    tenant=st.text(max_size=3),
    slo_class=st.text(max_size=3),
    ttft_slo_s=st.none() | st.floats(0, 1e6),
    tpot_slo_s=st.none() | st.floats(0, 1e6),
    deadline_s=st.none() | st.floats(0, 1e6),
    expires_after_s=st.none() | st.floats(0, 1e6),
    session_id=st.text(max_size=3),
    content=st.none()
    | st.sampled_from(
        [PromptContent(((1, 1), ("a", 2))), PromptContent(((("out", "7"), 3),)), PromptContent(((("t", 1), 3),))]
    ),
    prompt_token_ids=st.none() | st.tuples(*[st.integers(0, 2**40)] * 3),
    think_time_s=st.floats(0, 1e6),
    metadata=st.dictionaries(
        st.text(max_size=3), st.text(max_size=3) | st.integers() | st.floats(allow_nan=False), max_size=2
    ),
)


@given(
    st.lists(specs, min_size=1, max_size=5, unique_by=lambda spec: spec.request_id),
    st.sampled_from(["w.jsonl", "w.jsonl.gz"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_what_is_written_is_read_back_equal(tmp_path: Path, requests: list[RequestSpec], name: str) -> None:
    workload = Workload.from_requests(requests, sort=True)
    write_jsonl(workload, tmp_path / name)
    written_bytes = (tmp_path / name).read_bytes()
    again = read_jsonl(tmp_path / name)
    assert list(again) == list(workload)
    write_jsonl(again, tmp_path / name)
    assert (tmp_path / name).read_bytes() == written_bytes
    assert (written_bytes[:2] == b"\x1f\x8b") == name.endswith("gz")


def test_followers_survive_a_round_trip(tmp_path: Path, three: Workload) -> None:
    write_jsonl(three, tmp_path / "w.jsonl")
    assert list(read_jsonl(tmp_path / "w.jsonl")) == list(three)
    assert len((tmp_path / "w.jsonl").read_text().splitlines()) == 3


def test_a_join_of_several_requests(tmp_path: Path) -> None:
    requests = [
        RequestSpec("plan", 0.0, 1, 1),
        RequestSpec("search", 1.0, 1, 1, follows="plan"),
        RequestSpec("read", 1.0, 1, 1, follows="plan"),
        RequestSpec("answer", 2.0, 1, 1, follows=("search", "read"), think_time_s=0.5),
    ]
    write_jsonl(Workload.from_requests(requests), tmp_path / "w.jsonl")
    assert '"follows":"plan"' in (tmp_path / "w.jsonl").read_text(), "one parent is written as ever"
    assert list(read_jsonl(tmp_path / "w.jsonl")) == requests
    rows = [f"{r.request_id},{r.arrived_at},1,1,{';'.join(r.parents)},{r.think_time_s}" for r in requests]
    header = "request_id,arrived_at,num_prompt_tokens,num_output_tokens,follows,think_time_s"
    assert list(read_csv(written(tmp_path, "\n".join([header, *rows, ""])))) == requests


def test_an_id_with_a_semicolon_is_one_request(tmp_path: Path) -> None:
    text = "request_id,arrived_at,num_prompt_tokens,num_output_tokens,follows\na;b,0,1,1,\nc,1,1,1,a;b\n"
    assert read_csv(written(tmp_path, text))[1].parents == ("a;b",)


# --- The public traces ------------------------------------------------------------------------------------------------


def test_the_azure_conversation_trace(data: Path) -> None:
    statistics = read_azure(data / "azure2023" / "AzureLLMInferenceTrace_conv.csv").statistics()
    assert statistics.num_requests == 19366
    assert statistics.rate == pytest.approx(5.53, abs=0.01)
    assert statistics.iat_cv == pytest.approx(1.094, abs=0.001)
    assert (statistics.prompt.p50, statistics.prompt.p99, statistics.prompt.max) == (1020, 4142, 14050)
    assert statistics.output.mean == pytest.approx(211, abs=0.5)


def test_the_mooncake_conversation_trace(data: Path) -> None:
    statistics = read_mooncake(data / "mooncake" / "conversation_trace.jsonl.gz").statistics()
    assert statistics.num_requests == 12031
    assert statistics.prompt.mean == pytest.approx(12035, abs=1)
    assert statistics.prefix_share_fraction == pytest.approx(0.3736, abs=0.0001)


def test_the_agentic_sessions(data: Path) -> None:
    workload = read_agentic(data / "agentic_coding" / "sessions.jsonl.gz")
    statistics = workload.statistics()
    assert statistics.num_sessions == 676
    assert statistics.num_requests + workload.source["num_dropped_empty"] == 44082
    assert statistics.prefix_share_fraction == pytest.approx(0.963, abs=0.003)


def test_the_files_of_lengths(data: Path) -> None:
    arena = read_lengths(data / "vtc_arena" / "arena_requests.csv").statistics()
    assert (arena.num_requests, arena.num_tenants, arena.prompt.p50) == (1500, 27, 40)
    sharegpt = read_lengths(data / "sharegpt300" / "sharegpt_llama31_8b_300.csv").statistics()
    assert sharegpt.num_requests == 300
    assert sharegpt.prefix_share_fraction == pytest.approx(0.0759, abs=0.0001)
    arxiv = read_lengths(
        data / "arxiv_summarization" / "arxiv_summarization.csv.gz", arrivals=lambda number: np.arange(number) / 2.0
    ).statistics()
    assert (arxiv.num_requests, arxiv.rate) == (28257, pytest.approx(2.0))
    assert arxiv.prompt.mean == pytest.approx(2588, abs=1)


def test_the_vidur_workload(data: Path) -> None:
    workload = read_csv(data.parent / "golden" / "vidur" / "W3_workload.csv.gz")
    assert len(workload) == 500
    assert workload[0] == RequestSpec("0", 0.118295, 2440, 65)
