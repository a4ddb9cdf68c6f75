"""The Python front door: what notebooks and scripts call, with what they may give it by mistake."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vajra_py as vajra
from tests.experiment.small import SMALL, WORKLOAD
from vajra_py.contract import Layer, PolicyConfig, PolicySpec, fill
from vajra_py.errors import ConfigError, PluginError, PolicyError, RunError
from vajra_py.metrics.runs.run_data import RunData

NUM_REQUESTS = WORKLOAD["num_requests"]
SWEEP: dict[str, Any] = {**SMALL, "sweep": {"scheduling.request_prioritizer": ["fcfs", "lrs"], "seed": [1, 2]}}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The experiment as a file."""
    path = tmp_path / "small.yaml"
    path.write_text(repr_as_yaml(SMALL))
    return path


def repr_as_yaml(value: Any) -> str:
    from ruamel.yaml import YAML

    text = io.StringIO()
    YAML(typ="safe").dump(value, text)
    return text.getvalue()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    """The four runs of a small sweep."""
    folder = tmp_path_factory.mktemp("runs")
    return list(vajra.sweep({**SWEEP, "output": {"dir": str(folder)}}).runs)


# Loading


def test_a_file_a_path_and_a_mapping_are_the_same_experiment(file: Path) -> None:
    from_file, from_text, from_mapping = vajra.load(file), vajra.load(str(file)), vajra.load(SMALL)
    assert from_file.model_dump() == from_text.model_dump() == from_mapping.model_dump()


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("seed", 7, "seed"),
        ("seed", np.int64(7), "seed"),
        ("output.dir", Path("some/where"), "output_dir"),
        ("description", "a: b # c, 'd' \"e\" é \n f", "description"),
        ("description", "null", "description"),
        ("description", "2026-01-01", "description"),
        ("view_interval_s", np.float64(0.25), "view_interval_s"),
    ],
)
def test_values_of_python_are_taken_as_they_are(path: str, value: Any, read: str) -> None:
    assert getattr(vajra.load(SMALL, {path: value}), read) == value


def test_sections_and_arrays_are_values_too() -> None:
    latency = {"type": "constant", "step_time_s": np.float64(0.5)}
    config = vajra.load(
        SMALL,
        {"backend.simulator.latency": latency, "capacity": {"slo": "p99(ttft) <= 1", "curve": np.array([1.0, 2.0])}},
    )
    assert config.backend.settings.latency.parameters.step_time_s == 0.5
    assert config.capacity is not None
    assert config.capacity.curve == (1.0, 2.0)


@pytest.mark.parametrize("source", [None, 3, [], object(), 1.5], ids=lambda one: type(one).__name__)
def test_what_is_no_experiment_is_told(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"experiment: cannot be read from .*Allowed: a path, or a mapping"):
        vajra.load(source)
    with pytest.raises(ConfigError, match="experiment: cannot be read from"):
        vajra.run(source)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("seed", object(), r"seed: is not plain data \(got object\)"),
        ("seed", {1, 2}, r"seed: is not plain data \(got set\)"),
        ("description", lambda: None, r"description: is not plain data \(got function\)"),
        ("view_interval_s", math.nan, r"view_interval_s: must be made of finite numbers \(got nan\)"),
        ("view_interval_s", -1, "view_interval_s: must be at least 0"),
        ("nowhere.at.all", 1, "nowhere: unknown key"),
        ("", 1, "--set"),
    ],
)
def test_an_override_that_cannot_be_is_told(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vajra.load(SMALL, {path: value})


def test_what_cannot_be_made_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """As `vajra check` refuses it: a latency model that knows no memory, a trace that is not there."""
    simulator = {"latency": {"type": "constant", "step_time_s": 0.01}}
    sizeless = {name: value for name, value in SMALL.items() if name != "replica"}
    with pytest.raises(ConfigError, match=r"num_blocks: is missing"):
        vajra.load({**sizeless, "backend": {"simulator": simulator}})
    with pytest.raises(ConfigError, match=r"none\.csv"):
        vajra.load({**SMALL, "workload": {"type": "azure", "path": str(tmp_path / "none.csv")}})


def test_a_mapping_is_left_as_it_was() -> None:
    import copy

    before = copy.deepcopy(SWEEP)
    given = copy.deepcopy(SWEEP)
    config = vajra.load(given, {"seed": 3})
    vajra.sweep(config)
    assert given == before


# Running


def test_run_takes_what_load_takes(file: Path) -> None:
    for index, source in enumerate((file, str(file), SMALL, vajra.load(file))):
        assert vajra.run(source, folder=f"out-{index}").is_finished
    tables = [run.requests_frame() for run in vajra.open_runs([f"out-{index}" for index in range(4)])]
    assert all(one.equals(tables[0]) for one in tables)


def test_a_sweep_is_not_run_as_one() -> None:
    with pytest.raises(ConfigError, match="sweep: this experiment is more than one run"):
        vajra.run(SWEEP)
    with pytest.raises(ConfigError, match="replications: this experiment is more than one run"):
        vajra.run({**SMALL, "replications": 2})


def test_progress_counts_every_request_once() -> None:
    seen: list[tuple[int, int, float]] = []
    vajra.run(SMALL, folder="out", progress=lambda done, total, now: seen.append((done, total, now)))
    assert [total for _, total, _ in seen] == [NUM_REQUESTS] * len(seen)
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][0] == NUM_REQUESTS
    assert [now for _, _, now in seen] == sorted(now for _, _, now in seen)


def test_what_a_progress_function_raises_comes_through() -> None:
    def fail(done: int, total: int, now: float) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        vajra.run(SMALL, folder="out", progress=fail)
    assert vajra.open_runs("out")[0].manifest["status"] == "failed"


@pytest.mark.parametrize("workers", [0, -3, "2", 1.5, True])
def test_workers_are_counted(workers: Any) -> None:
    for call in (vajra.sweep, vajra.capacity):
        with pytest.raises(ConfigError, match="workers: must be a whole number of at least 1"):
            call(SWEEP, workers=workers)


def test_a_sweep_of_one_is_one_run() -> None:
    result = vajra.sweep(SMALL)
    assert len(result.runs) == 1
    assert not result.failures
    assert Path("runs/small/manifest.json").exists()


def test_runs_of_a_sweep_are_in_its_order_and_kept(runs: list[RunData]) -> None:
    wanted = [(policy, seed) for policy in ("fcfs", "lrs") for seed in (1, 2)]
    assert [_point(run) for run in runs] == wanted
    folder = runs[0].path.parent.parent
    seen: list[Any] = []
    again = vajra.sweep(
        {**SWEEP, "output": {"dir": str(folder)}}, progress=lambda index, one: seen.append((index, one))
    )
    assert [_point(run) for run in again.runs] == wanted
    assert [(index, one.is_finished, one.was_there) for index, one in seen] == [(i, True, True) for i in range(4)]


def _point(run: RunData) -> tuple[str, int]:
    config = run.manifest["config"]
    return config["scheduling"]["request_prioritizer"]["policy"], config["seed"]


def test_a_point_that_fails_does_not_stop_the_others() -> None:
    class Broken:
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            if now > 0.3:
                raise ValueError("a bug of mine")
            fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))

    own = PolicySpec("broken", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda config, context: Broken(), "Fails.")
    swept = {**SMALL, "sweep": {"scheduling.replica_scheduler": ["orca", "broken", "vllm_v1"]}}
    result = vajra.sweep(swept, policies=[own])
    assert [run.manifest["config"]["scheduling"]["replica_scheduler"]["policy"] for run in result.runs] == [
        "orca",
        "vllm_v1",
    ]
    ((label, error),) = result.failures
    assert "broken" in label
    assert "a bug of mine" in error
    kept = vajra.open_runs("runs/small")
    assert sorted(run.manifest["status"] for run in kept) == ["failed", "finished", "finished"]


# Policies of a notebook


class LongestFirst:
    """Long prompts first."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        for request in sorted(replica.waiting(), key=lambda one: -one.num_prompt_tokens):
            batch.add(request, min(batch.max_chunk(request), batch.tokens_left))
        for request in replica.running():
            batch.add(request, 1 if request.is_decoding else min(batch.max_chunk(request), batch.tokens_left))


def spec(name: str, build: Any) -> PolicySpec:
    return PolicySpec(name, Layer.REPLICA_SCHEDULER, PolicyConfig, build, "Mine.")


def with_scheduler(name: str) -> dict[str, Any]:
    return {**SMALL, "scheduling": {**SMALL["scheduling"], "replica_scheduler": name}}


def test_lambdas_closures_and_local_classes_are_policies() -> None:
    limit = 64

    class Local:
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            fill(
                replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left, limit)
            )

    named = {"from_a_lambda": lambda config, context: Local(), "from_a_class": lambda *_: Local()}
    found = []
    for name, build in named.items():
        run = vajra.run(with_scheduler(name), folder=name, policies=[spec(name, build)])
        frame = run.steps_frame("prefill_tokens", "num_prefills")
        assert (frame.prefill_tokens <= limit * frame.num_prefills).all()
        found.append(run.requests_frame())
    assert found[0].equals(found[1])


def test_two_policies_of_one_name_are_refused() -> None:
    twice = [spec("mine", lambda config, context: LongestFirst())] * 2
    with pytest.raises(PluginError, match="mine"):
        vajra.load(with_scheduler("mine"), policies=twice)


def test_one_spec_is_no_list_of_policies() -> None:
    wrong: Any = spec("mine", lambda config, context: LongestFirst())
    for call in (vajra.load, vajra.run):
        with pytest.raises(ConfigError, match=r"policies: must be a list of specs .*policies=\[SPEC\]"):
            call(SMALL, policies=wrong)


def test_overrides_are_a_mapping() -> None:
    wrong: Any = ["name=x"]
    with pytest.raises(ConfigError, match=r"overrides: must map dotted paths to values \(got \['name=x'\]\)"):
        vajra.load(SMALL, wrong)


@pytest.mark.parametrize("wrong", ["fcfs", [int], [None], [LongestFirst]], ids=str)
def test_what_is_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(PluginError, match="expected a PolicySpec"):
        vajra.load(SMALL, policies=wrong)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda config, context: None, "schedule"),
        (lambda config, context: LongestFirst, "schedule|instance|class"),
        (lambda config, context: 1 / 0, "division by zero"),
        (lambda config: LongestFirst(), "argument"),
    ],
    ids=["nothing", "a class", "an error", "a wrong signature"],
)
def test_a_policy_that_cannot_be_built_is_named(build: Any, said: str) -> None:
    with pytest.raises((PluginError, ConfigError, PolicyError), match=said) as caught:
        vajra.run(with_scheduler("mine"), folder="out", policies=[spec("mine", build)])
    assert "mine" in str(caught.value)


def test_a_policy_that_breaks_in_the_middle_is_named_with_its_line_and_the_run_keeps_what_it_had() -> None:
    class Breaks:
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            if now > 0.5:
                _ = {}["no such key"]
            fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))

    with pytest.raises(PolicyError) as caught:
        vajra.run(with_scheduler("mine"), folder="out", policies=[spec("mine", lambda *_: Breaks())])
    assert "mine" in str(caught.value)
    assert "test_api.py" in str(caught.value)
    (left,) = vajra.open_runs("out")
    frame = left.requests_frame("request_id", "reason")
    assert len(frame) == left.manifest["num_submitted"]
    assert left.manifest["num_unfinished"] > 0


# Reading


def test_tables_are_frames_of_the_columns_asked_for(runs: list[RunData]) -> None:
    run = runs[0]
    everything = run.requests_frame()
    assert len(everything) == NUM_REQUESTS
    few = run.requests_frame("ttft_s", "request_id")
    assert list(few.columns) == ["ttft_s", "request_id"]
    pd.testing.assert_series_equal(few.ttft_s, everything.ttft_s)
    with pytest.raises(RunError, match=r"no such column \(nope\)\. Allowed: request_id"):
        run.requests_frame("nope")
    with pytest.raises(RunError, match=r"no such column"):
        run.steps_frame("ttft_s")


def test_times_of_a_request_fit_together(runs: list[RunData]) -> None:
    for run in runs:
        frame = run.requests_frame()
        assert (frame.arrived_at <= frame.admitted_at).all()
        assert (frame.admitted_at < frame.first_token_at).all()
        assert (frame.first_token_at <= frame.ended_at).all()
        np.testing.assert_allclose(frame.ttft_s, frame.first_token_at - frame.arrived_at, atol=1e-9)
        np.testing.assert_allclose(frame.e2e_s, frame.ended_at - frame.arrived_at, atol=1e-9)


def test_steps_account_for_every_token(runs: list[RunData]) -> None:
    for run in runs:
        requests = run.requests_frame("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")
        steps = run.steps_frame("decode_tokens", "prefill_tokens", "num_finished", "duration_s", "formed_at")
        assert requests.num_preemptions.sum() == 0
        assert steps.prefill_tokens.sum() == (requests.num_prompt_tokens - requests.num_cached_tokens).sum()
        assert steps.decode_tokens.sum() == (requests.num_output_tokens - 1).sum()
        assert steps.num_finished.sum() == NUM_REQUESTS
        np.testing.assert_allclose(steps.duration_s, 0.01)


def test_a_comparison_has_a_row_a_setting_in_every_form(runs: list[RunData]) -> None:
    comparison = vajra.compare(runs)
    frame = comparison.frame()
    assert len(frame) == 2  # two seeds of two settings
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    overall = [row for row in rows if row["scope"] == "overall"]
    assert [row["run"] for row in overall] == list(frame.index if frame.index.name else frame["run"])
    for row, (_, own) in zip(overall, frame.iterrows(), strict=True):
        assert float(row["ttft_p99_s"]) == pytest.approx(own["ttft_p99_s"])
    markdown = comparison.to_markdown()
    assert all(row["run"] in markdown for row in overall)
    each = vajra.metrics.compare(runs, each_run=True)
    assert len(each.frame()) == 4


def test_a_mean_over_seeds_is_the_mean_of_the_seeds(runs: list[RunData]) -> None:
    frame = vajra.compare(runs).frame()
    for setting, members in zip(frame.itertuples(), (runs[:2], runs[2:]), strict=True):
        means = [run.requests_frame("ttft_s").ttft_s.mean() for run in members]
        assert setting.ttft_mean_s == pytest.approx(np.mean(means))


def test_runs_are_compared_by_their_paths_too(runs: list[RunData]) -> None:
    folder = runs[0].path.parent
    names = vajra.compare(folder).names
    assert vajra.compare(str(folder)).names == vajra.compare([run.path for run in runs]).names == names
    assert len(vajra.compare(runs[0]).names) == 1


@pytest.mark.parametrize("wrong", [[1], 1, None])
def test_what_is_no_run_is_told(wrong: Any) -> None:
    with pytest.raises(RunError, match=r"compare: the runs are neither opened runs nor paths .* Allowed"):
        vajra.compare(wrong)


def test_both_names_of_a_sweeps_point_are_its_name() -> None:
    path = "scheduling.replica_scheduler.params.chunk_size"
    found = vajra.sweep({**SMALL, "name": "chunks", "sweep": {path: [64, 256]}})
    opened = vajra.compare(found.runs[0].path.parent)
    assert opened.names == vajra.compare(found.runs).names == ("chunk_size=64", "chunk_size=256")
    assert [opened.position(name) for name in ("256", "chunk_size=64")] == [1, 0]
    with pytest.raises(RunError, match="no setting has that name"):
        opened.position("512")


@pytest.mark.parametrize(
    "call", [vajra.compare, lambda runs: vajra.report(runs, "x.html"), lambda runs: vajra.figures(runs, "x")]
)
def test_no_run_is_told(call: Any) -> None:
    with pytest.raises(RunError, match="no run was given"):
        call([])


# Writing


def test_a_report_is_written_into_folders_that_are_made(runs: list[RunData]) -> None:
    path = vajra.report(runs, "new/folders/report.html", title="Ours & theirs <b>")
    text = path.read_text()
    assert "Ours &amp; theirs &lt;b&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert not list(path.parent.glob("*.partial"))
    assert vajra.report(runs, "again.html", title="Ours & theirs <b>").read_bytes() == path.read_bytes()


def test_a_report_does_not_take_the_place_of_a_folder(runs: list[RunData], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for name in ("taken", "."):
        with pytest.raises(RunError, match=r"is a folder\. Name a file"):
            vajra.report(runs, name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"formats": ["gif"]}, r"not a format for files \('gif'\)"),
        ({"formats": "bmp"}, r"not a format for files \('bmp'\)"),
        ({"only": ["latency_cdf"]}, "Did you mean 'latency_cdfs'"),
        ({"only": "nothing"}, r"there is none of that name \('nothing'\)"),
        ({"width_in": math.nan}, "not a width"),
        ({"width_in": 0}, "not a width"),
        ({"width_in": 1e6}, "not a width"),
    ],
    ids=str,
)
def test_figures_that_cannot_be_drawn_are_refused_before_anything_is_written(
    settings: dict[str, Any], said: str, runs: list[RunData]
) -> None:
    with pytest.raises(RunError, match=said):
        vajra.figures(runs, "figures", **settings)
    assert not Path("figures").exists()


def test_one_figure_in_one_format_and_its_numbers(runs: list[RunData]) -> None:
    written = vajra.figures(runs, "figures", formats="svg", only="latency_cdfs")
    assert sorted(path.name for path in written) == [
        "latency_cdfs.csv",
        "latency_cdfs.svg",
        "table.csv",
        "table.md",
        "table.tex",
    ]
    rows = list(csv.DictReader(io.StringIO(Path("figures/latency_cdfs.csv").read_text())))
    assert rows
    assert {"panel", "series", "x", "y"} <= set(rows[0])


def test_the_front_door_offers_what_it_lists() -> None:
    for name in dir(vajra):
        assert getattr(vajra, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = vajra.nope
