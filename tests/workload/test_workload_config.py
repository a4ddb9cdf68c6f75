"""What is written under `workload:`, from mapping to workload."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import vajra_py.workload
from vajra_py.errors import WorkloadError
from vajra_py.workload import Workload, WorkloadConfig, build_workload, named_streams, profile_names
from vajra_py.workload.kinds import kind_of_workload
from vajra_py.workload.kinds.csv import CsvField
from vajra_py.workload.kinds.profile import ProfileName
from vajra_py.workload.readers.csv import CSV_FIELDS

ADAPTER: TypeAdapter[Any] = TypeAdapter(WorkloadConfig)
SYNTHETIC = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 2.0},
    "prompt_tokens": {"type": "lognormal", "mu": 5, "sigma": 1},
    "output_tokens": {"type": "uniform", "min": 1, "max": 100},
    "num_requests": 200,
}
SESSIONS = {
    "type": "sessions",
    "arrivals": {"type": "gamma", "rate": 0.5, "cv": 2},
    "num_sessions": 40,
    "turns": {"type": "geometric", "p": 0.4},
    "first_turn_tokens": {"type": "constant", "value": 50},
    "turn_tokens": {"type": "constant", "value": 20},
    "output_tokens": {"type": "constant", "value": 30},
    "think_time_s": {"type": "lognormal", "mu": 1, "sigma": 1},
    "system_prompts": {"count": 2, "tokens": {"type": "constant", "value": 200}},
}


def quantiles(probabilities: list[float], values: list[float]) -> dict[str, Any]:
    return {"type": "quantiles", "probabilities": probabilities, "values": values}


def build(tree: dict[str, Any], base_dir: Path = Path(), seed: int = 1) -> Workload:
    return build_workload(ADAPTER.validate_python(tree), named_streams(seed), base_dir)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = "".join(f"{i},{10 * i + 10},{i + 1}\n" for i in range(20))
    (tmp_path / "plain.csv").write_text("arrived_at,num_prompt_tokens,num_output_tokens\n" + rows)
    (tmp_path / "lengths.csv").write_text("prompt_len,output_len\n" + "".join(f"{i + 1},{i + 2}\n" for i in range(20)))
    azure = "".join(f"2023-11-16 18:15:{i:02d}.5,{i + 1},{i + 2}\r\n" for i in range(20))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + azure)
    burst = "".join(f"{i},GPT-4,{i + 1},{i},{2 * i + 1},API log\n" for i in range(20))
    (tmp_path / "burst.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + burst
    )
    line = {"input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    (tmp_path / "mooncake.jsonl").write_text("".join(json.dumps({"timestamp": i, **line}) + "\n" for i in range(20)))
    own = {"num_prompt_tokens": 5, "num_output_tokens": 5}
    own_lines = (json.dumps({"request_id": f"q{i}", "arrived_at": i, **own}) for i in range(20))
    (tmp_path / "own.jsonl").write_text("\n".join(own_lines))
    turns = [[i, 200 + i, 10, 2.0, 1.0, None, 1, 0, [1, 3]] for i in range(10)]
    session = {"block_size": 64, "tool_tokens": 10, "system_tokens": 20, "requests": turns}
    (tmp_path / "agentic.jsonl").write_text("".join(json.dumps({"id": str(i), **session}) + "\n" for i in range(2)))
    return tmp_path


FILES = [
    {"type": "azure", "path": "azure.csv"},
    {"type": "burstgpt", "path": "burst.csv"},
    {"type": "csv", "path": "plain.csv"},
    {"type": "lengths", "path": "lengths.csv", "arrivals": {"type": "fixed", "rate": 1}},
    {"type": "mooncake", "path": "mooncake.jsonl"},
    {"type": "jsonl", "path": "own.jsonl"},
    {"type": "agentic", "path": "agentic.jsonl", "arrivals": {"type": "at_once"}},
]


@pytest.mark.parametrize("tree", FILES, ids=lambda tree: tree["type"])
def test_every_kind_of_file_is_built_from_a_relative_path(files: Path, tree: dict[str, Any]) -> None:
    workload = build(tree, files)
    assert len(workload) == (19 if tree["type"] == "burstgpt" else 20)
    assert workload.source["kind"] == tree["type"]
    assert workload.source["file"] == tree["path"]
    assert json.loads(json.dumps(workload.source)) == workload.source


def test_a_path_may_be_seen_from_the_folder_of_the_file_that_names_it(files: Path) -> None:
    config = ADAPTER.validate_python(FILES[0], context={"base_folder": files})
    assert config.path == str(files / "azure.csv")
    assert len(build_workload(config, named_streams(1), Path("/nowhere"))) == 20


@pytest.mark.parametrize("tree", [SYNTHETIC, SESSIONS, {"type": "profile", "profile": "vtc_arena", "num_requests": 50}])
def test_the_same_streams_give_the_same_workload(tree: dict[str, Any]) -> None:
    assert list(build(tree)) == list(build(tree))
    assert list(build(tree)) != list(build(tree, seed=2))
    assert build(tree).source["streams"]["lengths"]["entropy"] == "1"


def test_options_apply_in_their_documented_order(files: Path) -> None:
    tree = {
        "type": "csv",
        "path": "plain.csv",
        "start_s": 2,
        "end_s": 18,
        "skip": 2,
        "max_prompt_tokens": 150,
        "first": 8,
        "rate": 4,
    }
    workload = build(tree, files)
    assert [r.request_id for r in workload] == [str(i) for i in range(4, 12)]
    assert workload[0].arrived_at == 0.0
    assert workload.rate == pytest.approx(4.0)
    assert [operation["op"] for operation in workload.source["operations"]] == [
        "slice",
        "limit_lengths",
        "slice",
        "at_rate",
    ]


def test_labels_are_drawn_each_from_its_own_stream() -> None:
    labels: dict[str, Any] = {
        "priorities": [{"priority": 0, "share": 1}, {"priority": 5, "share": 1}],
        "tenants": {"count": 3, "zipf_exponent": 1.2},
        "slo_classes": [
            {"name": "chat", "share": 3, "ttft_slo_s": 1.0},
            {"name": "batch", "share": 1, "deadline_s": 60},
        ],
        "max_tokens": 64,
    }
    everything = build(SYNTHETIC | labels)
    for left_out in labels:
        fewer = build(SYNTHETIC | {key: value for key, value in labels.items() if key != left_out})
        changed = {
            field
            for field in (
                "arrived_at",
                "num_prompt_tokens",
                "num_output_tokens",
                "priority",
                "tenant",
                "slo_class",
                "max_tokens",
            )
            if [getattr(r, field) for r in fewer] != [getattr(r, field) for r in everything]
        }
        assert changed == {
            {"priorities": "priority", "tenants": "tenant", "slo_classes": "slo_class"}.get(left_out, left_out)
        }
    assert {r.tenant for r in everything} == {"tenant-0", "tenant-1", "tenant-2"}
    assert {(r.slo_class, r.ttft_slo_s, r.deadline_s) for r in everything} == {
        ("chat", 1.0, None),
        ("batch", None, 60.0),
    }


def test_a_merge_draws_from_streams_of_its_own_for_each_part() -> None:
    short = SYNTHETIC | {"name": "short", "tenants": {"shares": {"a": 1}}}
    long = SYNTHETIC | {"name": "long", "prompt_tokens": {"type": "constant", "value": 100_000}}
    merged = build({"type": "merge", "workloads": [short, long], "rate": 3.0, "name": "mix"})
    assert (merged.name, len(merged)) == ("mix", 400)
    unpaced = build({"type": "merge", "workloads": [short, long], "name": "mix"})
    expected = 2 * SYNTHETIC["arrivals"]["rate"]  # of two parts of one rate and length, whatever a seed drew
    np.testing.assert_allclose(merged.columns.arrived_at, unpaced.columns.arrived_at * (expected / 3.0))
    alone = build({"type": "merge", "workloads": [long]})
    longs = [r for r in merged if r.request_id.startswith("long/")]
    assert [r.num_output_tokens for r in longs] == [r.num_output_tokens for r in alone]
    assert {r.tenant for r in longs} == {""}
    nested = build({"type": "merge", "workloads": [{"type": "merge", "workloads": [short, short]}, long]})
    assert len({r.request_id for r in nested}) == 600


def test_a_profile_with_a_rate_and_a_limit_meets_both_on_average() -> None:
    tree: dict[str, Any] = {
        "type": "profile",
        "profile": "azure2023_conv",
        "num_requests": 2000,
        "rate": 9.0,
        "max_prompt_tokens": 1024,
    }
    workload = build(tree)
    rates = [build(tree, seed=seed).rate for seed in range(30)]
    assert np.mean(rates) == pytest.approx(9.0, rel=0.03)
    assert (
        np.std(rates) > 0.03 * 9.0
    )  # the load of a minute has a coefficient of variation of 0.22, over some four minutes
    assert max(r.num_prompt_tokens for r in workload) <= 1024
    sessions = build({"type": "profile", "profile": "agentic_coding_sessions", "num_requests": 300, "rate": 2.0})
    assert len(sessions) == 300


PIECES = {"type": "piecewise", "pieces": [{"duration_s": 100, "rate": 3}, {"duration_s": 100, "rate": 0.5}]}
CHANGING = [
    SYNTHETIC | {"arrivals": PIECES, "num_requests": None},
    {"type": "merge", "workloads": [SYNTHETIC, SYNTHETIC | {"arrivals": {"type": "poisson", "rate": 8.0}}]},
]


@pytest.mark.parametrize("cut", [{"end_s": 20}, {"start_s": 20}, {"first": 50}, {"skip": 150}])
@pytest.mark.parametrize("tree", CHANGING)
def test_a_part_of_arrivals_whose_rate_changes_has_the_rate_that_is_set(
    tree: dict[str, Any], cut: dict[str, int]
) -> None:
    assert build(tree | cut | {"rate": 7}).rate == pytest.approx(7)


def test_closed_loops_are_synthetic_workloads() -> None:
    loop = {"type": "closed_loop", "num_users": 5, "think_time_s": {"type": "constant", "value": 2}}
    workload = build(SYNTHETIC | {"arrivals": loop, "num_requests": 23})
    assert sum(r.follows is None for r in workload) == 5


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"type": "azur", "path": "x"}, "azure"),
        ({"type": "azure"}, "path"),
        ({"type": "azure", "path": "x", "speed": 1}, "speed"),
        (SYNTHETIC | {"rate": 1, "time_scale": 2}, "rate and time_scale both set the pace"),
        (SYNTHETIC | {"rate": 0}, "greater than 0"),
        (SYNTHETIC | {"rate": float("inf")}, "finite"),
        (SYNTHETIC | {"start_s": 5, "end_s": 5}, "start_s is not before end_s"),
        (SYNTHETIC | {"num_requests": None}, "the arrivals have no end"),
        (
            SYNTHETIC | {"arrivals": {"type": "at_once"}, "num_requests": None, "duration_s": 5},
            "at_once arrivals have no end",
        ),
        (
            SYNTHETIC | {"arrivals": {"type": "closed_loop", "num_users": 1}, "duration_s": 5},
            "closed_loop arrivals need num_requests",
        ),
        (SYNTHETIC | {"priorities": [{"priority": 1, "share": 1}] * 2}, "priorities name one twice"),
        (SYNTHETIC | {"tenants": {}}, "needs either shares or count"),
        (SYNTHETIC | {"tenants": {"count": 2, "shares": {"a": 1}}}, "needs either shares or count"),
        (SYNTHETIC | {"tenants": {"shares": {"a": 1e308, "b": 1e308}}}, "less than or equal to 1000000000000"),
        (SYNTHETIC | {"arrivals": {"type": "gamma", "rate": 5, "cv": 1e200}}, "less than or equal to 1000"),
        (SYNTHETIC | {"arrivals": {"type": "gamma", "rate": 5, "cv": 1e-200}}, "greater than or equal to 0.001"),
        (SYNTHETIC | {"arrivals": {"type": "weibull", "rate": 5, "shape": 0.005}}, "greater than or equal to 0.05"),
        (
            SYNTHETIC | {"prompt_tokens": {"type": "geometric", "p": 0.5, "max": 10**400}},
            "less than or equal to 2147483647",
        ),
        (SYNTHETIC | {"prompt_tokens": quantiles([0, float("nan"), 1], [1, 2, 3])}, "finite"),
        (SYNTHETIC | {"prompt_tokens": quantiles([0, 1], [1, 1e300])}, "less than or equal to 2147483647"),
        (SYNTHETIC | {"prompt_tokens": {"type": "lognormal", "mu": 1, "sigma": 1, "min": 1e300}}, "2147483647"),
        (
            SYNTHETIC
            | {
                "arrivals": {
                    "type": "quantile_gaps",
                    "rate": 1,
                    "probabilities": [0, float("nan"), 1],
                    "gaps_s": [1, 2, 3],
                }
            },
            "finite",
        ),
        (SYNTHETIC | {"max_total_tokens": 10**22, "too_long": "clip"}, "less than or equal to 4294967296"),
        (SYNTHETIC | {"skip": 10**22}, "less than or equal to 1000000000"),
        (SYNTHETIC | {"tenants": {"count": 10**9}}, "less than or equal to 1000000"),
        (SESSIONS | {"max_context_tokens": 10**22}, "less than or equal to 1000000000"),
        (
            SESSIONS | {"system_prompts": SESSIONS["system_prompts"] | {"count": 10**22}},
            "less than or equal to 1000000",
        ),
        (SYNTHETIC | {"too_long": "crop"}, "'drop', 'clip' or 'error'"),
        ({"type": "lengths", "path": "x", "sample": True}, "sample together with arrivals"),
        ({"type": "csv", "path": "x", "columns": {"prompt": "a"}}, "num_prompt_tokens"),
        ({"type": "profile", "profile": "azure"}, "azure2023_conv"),
        ({"type": "merge", "workloads": []}, "at least 1"),
    ],
)
def test_a_wrong_configuration_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python(tree)
    assert message in str(caught.value)


def test_what_the_source_cannot_give_is_refused(files: Path) -> None:
    with pytest.raises(WorkloadError, match="no request is left after cutting"):
        build({"type": "csv", "path": "plain.csv", "start_s": 500}, files)
    with pytest.raises(WorkloadError, match="no request is left after cutting"):
        build({"type": "csv", "path": "plain.csv", "max_prompt_tokens": 5, "rate": 3}, files)
    with pytest.raises(WorkloadError, match=r"missing\.csv: cannot be read"):
        build({"type": "csv", "path": "missing.csv"}, files)
    with pytest.raises(WorkloadError, match="requests follow one another"):
        build(SESSIONS | {"rate": 3})


def models(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """The model and all models in its fields."""

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
            seen.add(annotation)
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for argument in get_args(annotation):
            visit(argument)

    visit(model)
    return seen


def test_every_field_is_described_and_every_model_is_closed() -> None:
    kinds = get_args(get_args(WorkloadConfig)[0])
    assert len(kinds) == 13
    for model in set().union(*(models(kind, set()) for kind in kinds)):
        assert model.model_config.get("frozen"), model
        assert model.model_config.get("extra") == "forbid", model
        for name, field in model.model_fields.items():
            assert name == "type" or field.description, f"{model.__name__}.{name}"


def test_the_schema_offers_every_kind_and_describes_its_keys() -> None:
    schema = ADAPTER.json_schema()
    kinds = schema["discriminator"]["mapping"]
    assert {"azure", "burstgpt", "mooncake", "lengths", "jsonl", "csv", "agentic", "synthetic", "sessions"} < set(kinds)
    for reference in kinds.values():
        kind = schema["$defs"][reference.rpartition("/")[2]]
        assert kind["additionalProperties"] is False
        assert kind["description"]
        assert all("description" in entry or name == "type" for name, entry in kind["properties"].items())


def test_names_are_listed_once() -> None:
    assert tuple(get_args(ProfileName)) == profile_names()
    assert set(get_args(CsvField)) == set(CSV_FIELDS)


def test_a_dumped_configuration_builds_the_same() -> None:
    for tree in (SYNTHETIC, SESSIONS):
        config = ADAPTER.validate_python(tree)
        again = ADAPTER.validate_json(config.model_dump_json())
        assert again == config
        assert list(build_workload(again, named_streams(1), Path())) == list(build(tree))


def test_a_kind_of_workload_is_found_by_its_type() -> None:
    kinds = get_args(get_args(WorkloadConfig)[0])
    names = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}
    found = {name: kind_of_workload(name) for name in names}
    assert found == names | {"merge": None}
    assert kind_of_workload("no such type") is None
    assert kind_of_workload(["azure"]) is None


def test_the_front_door_lists_what_it_offers() -> None:
    names = vajra_py.workload.__all__
    assert sorted(names) == sorted(set(names))
    assert all(hasattr(vajra_py.workload, name) for name in names)


def test_reading_a_trace_loads_nothing_heavy(files: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vajra_py.workload import read_azure;"
        f"assert len(read_azure(Path({str(files / 'azure.csv')!r}))) == 20;"
        "heavy = {'pandas', 'torch', 'scipy', 'pyarrow', 'matplotlib', 'transformers', 'triton'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_streams_of_different_names_differ() -> None:
    streams = named_streams(5)
    assert not np.array_equal(streams("a").random(4), streams("b").random(4))
    assert np.array_equal(streams("a").random(4), named_streams(5)("a").random(4))
