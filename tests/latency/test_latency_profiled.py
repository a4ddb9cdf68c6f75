"""Does a fit find what steps cost, say how wrong it is, and does a profile predict the same everywhere?"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.contract import BatchFeatures
from vajra_py.errors import ConfigError
from vajra_py.latency import PredictsDecodeRuns, Profile, ProfiledConfig, ProfiledModel, Variation, read_profile
from vajra_py.latency.models.fitting import (
    STEP_COLUMNS,
    Measured,
    errors_of,
    fit_steps,
    held_out_errors,
)
from vajra_py.latency.models.profiled import Curve
from vajra_py.latency.models.tabular import read_columns


def shapes(count: int, stream: np.random.Generator) -> list[BatchFeatures]:
    made = []
    for _ in range(count):
        num_decodes = int(np.exp(stream.uniform(0, 4)))
        shape = BatchFeatures().with_decodes(num_decodes, num_decodes * int(stream.integers(1, 500)))
        for _ in range(int(stream.integers(0, 4))):
            shape = shape.with_chunk(int(np.exp(stream.uniform(0, 6))), int(stream.integers(0, 400)))
        made.append(shape)
    return made


def true_time_s(shape: BatchFeatures) -> float:
    """Matrix products that fill the device from 32 tokens on, attention over what is read, and something per chunk."""
    tokens = 2e-4 * min(shape.num_tokens, 32) + 5e-5 * max(0, shape.num_tokens - 32)
    attention = 3e-8 * shape.decode_context_tokens + 1e-8 * shape.prefill_attention_pairs
    return 2e-3 + tokens + attention + 4e-4 * shape.num_prefills


def test_a_fit_finds_the_formula() -> None:
    stream = np.random.default_rng(0)
    measured = [Measured(shape, true_time_s(shape)) for shape in shapes(400, stream)]
    errors = held_out_errors(measured, stream.permutation(len(measured)).tolist())
    assert errors["all"]["num_shapes"] == 80
    assert errors["all"]["p50"] < 0.01
    assert errors["all"]["p90"] < 0.03
    assert set(errors) == {"all", "decode", "mixed"}
    model = ProfiledModel(Profile(fit_steps(measured), {}))
    for shape in shapes(50, stream):
        assert model.batch_time_s(shape) == pytest.approx(true_time_s(shape), rel=0.05)


def test_errors_say_what_noise_leaves() -> None:
    stream = np.random.default_rng(1)
    noise = stream.lognormal(0.0, 0.1, 400)
    measured = [
        Measured(shape, true_time_s(shape) * factor) for shape, factor in zip(shapes(400, stream), noise, strict=True)
    ]
    errors = held_out_errors(measured, stream.permutation(len(measured)).tolist())
    assert 0.04 < errors["all"]["p50"] < 0.12
    assert abs(errors["all"]["mean"]) < 0.05


@pytest.mark.parametrize("most", [3, 8, 200])
def test_few_tokens_may_take_longer_than_some_more(most: int) -> None:
    """Two rows are a slow product here, as of some libraries, and from twelve on each costs the same."""

    def time_s(shape: BatchFeatures) -> float:
        of_tokens = {1: 13e-3, 2: 16e-3, 3: 13e-3}.get(shape.num_tokens, 12.5e-3 + 5e-4 * max(0, shape.num_tokens - 6))
        return of_tokens + 1e-6 * shape.decode_context_tokens

    decodes = [
        BatchFeatures(count, count * context)
        for count in [*range(1, min(9, most) + 1), *range(16, most, 16)]
        for context in (16, 64, 256)
    ]
    fit = fit_steps([Measured(one, time_s(one)) for one in decodes])
    for one in decodes:
        assert fit.time_s(one) == pytest.approx(time_s(one), rel=0.02 if most > 3 else 0.15)
    assert min(fit.base_s, *fit.curves["num_tokens"].values) >= 0.0
    assert fit.time_s(BatchFeatures(10 * most, 0)) >= fit.time_s(BatchFeatures(most, 0))


def test_a_few_disturbed_measurements_do_not_move_it() -> None:
    stream = np.random.default_rng(2)
    measured = [Measured(shape, true_time_s(shape)) for shape in shapes(300, stream)]
    disturbed = [
        Measured(one.features, one.time_s * (10 if index % 30 == 0 else 1)) for index, one in enumerate(measured)
    ]
    assert errors_of(fit_steps(disturbed).time_s, measured)["all"]["p90"] < 0.05


def test_a_fit_needs_measurements() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        fit_steps([])
    one = BatchFeatures(num_decodes=1, decode_context_tokens=5)
    assert fit_steps([Measured(one, 0.25)]).time_s(one) == pytest.approx(0.25)


knots = st.lists(st.integers(1, 1000), min_size=1, max_size=8, unique=True).map(sorted)


@given(
    knots, st.lists(st.floats(0, 10), min_size=9, max_size=9), st.lists(st.integers(0, 3000), min_size=1, max_size=20)
)
def test_curves_rise_and_are_the_same_one_by_one_and_at_once(
    inner: list[int], rises: list[float], points: list[int]
) -> None:
    all_knots = (0.0, *map(float, inner))
    curve = Curve(all_knots, (0.0, *np.cumsum(rises[: len(inner)]).tolist()))
    values = [curve.at(float(point)) for point in sorted(points)]
    assert values == curve.at_each(np.array(sorted(points), np.float64)).tolist()
    assert all(one <= other + 1e-9 for one, other in pairwise(values))
    for knot, value in zip(curve.knots, curve.values, strict=True):
        assert curve.at(knot) == pytest.approx(value, abs=1e-9)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    stream = np.random.default_rng(3)
    measured = [Measured(shape, true_time_s(shape)) for shape in shapes(100, stream)]
    file = tmp_path / "profile.json"
    facts, errors, variation = (
        {"model": "some", "max_model_len": 512},
        {"all": {"p50": 0.01}},
        Variation((0.75, 1.25), (0.5, 1.0, 1.5)),
    )
    Profile(fit_steps(measured), facts, errors, 100, variation).write(file)
    return file


def test_a_profile_is_read_back_equal(profile: Path) -> None:
    found = read_profile(profile)
    assert found.facts["max_model_len"] == 512
    assert found.num_shapes == 100
    assert found.variation == Variation((0.75, 1.25), (0.5, 1.0, 1.5))
    copy = profile.with_name("copy.json")
    found.write(copy)
    assert copy.read_bytes() == profile.read_bytes()


def test_steps_vary_unless_they_are_not_to(profile: Path) -> None:
    assert ProfiledConfig(path=str(profile)).build().variation == Variation((0.75, 1.25), (0.5, 1.0, 1.5))
    assert ProfiledConfig(path=str(profile), variation=False).build().variation is None
    without = {key: value for key, value in json.loads(profile.read_text()).items() if key != "variation"}
    profile.write_text(json.dumps(without))
    assert ProfiledConfig(path=str(profile)).build().variation is None


def test_runs_of_decodes_are_predicted_bit_for_bit(profile: Path) -> None:
    model = ProfiledConfig(path=str(profile)).build()
    assert isinstance(model, PredictsDecodeRuns)
    at_once = model.decode_run_times_s(7, 300, 400).tolist()
    one_by_one = [model.batch_time_s(BatchFeatures(7, 300 + 7 * step)) for step in range(400)]
    assert at_once == one_by_one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "is not a profile"),
        ({"version": 99}, "is of another version"),
        ({"base_s": -1.0}, "is broken"),
        ({"base_s": 10**400}, "is broken"),
        ({"num_shapes": float("inf")}, "is broken"),
        ({"errors": [1]}, "is broken"),
        ({"errors": {"all": [1]}}, "is broken"),
        ({"coefficients": {}}, "is broken"),
        ({"variation": {"decodes": [0.5, 0.9], "prompts": [1.0]}}, "is broken .*decodes are not 1 on average"),
        ({"variation": {"decodes": [1.0]}}, "is broken .*prompts"),
        ({"curves": {"num_tokens": {"knots": [0, 0], "values": [0, 1]}}}, "is broken"),
    ],
)
def test_a_broken_profile_is_one_clear_line(profile: Path, change: dict[str, object], message: str) -> None:
    profile.write_text(json.dumps({**json.loads(profile.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(profile)
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(profile / "absent")


def test_measured_steps_of_ones_own_are_fitted(tmp_path: Path) -> None:
    rows = ["num_decodes,decode_context_tokens,num_prefills,prefill_tokens,prefill_context_tokens,note,time_s"]
    for decodes in (1, 2, 4, 8, 16, 32, 64):
        for context in (16, 256, 1024, 4096):
            total = decodes * context
            rows.append(f"{decodes},{total},0,0,0,x,{5e-3 + 1e-5 * decodes + 2e-9 * total}")
            rows.append(f"{decodes},{total},1,256,0,x,{5e-3 + 1e-5 * (decodes + 256) + 2e-9 * total}")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(rows) + "\n")
    model = ProfiledConfig(path=str(path)).build()
    assert model.batch_time_s(BatchFeatures(24, 24 * 512)) == pytest.approx(5e-3 + 24e-5 + 2e-9 * 24 * 512, rel=0.02)
    described = model.describe()
    assert (described.origin, described.source) == ("measured", "a fit to the measured steps of steps.csv")
    assert described.errors["step"] < 0.05


def test_other_columns_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    names = (*STEP_COLUMNS, "time_s")
    (tmp_path / "steps.csv").write_text(f"{','.join(names)},device\n1,10,0,0,0,0.5,H100\n", encoding="utf-8-sig")
    (tmp_path / "steps.json").write_text(json.dumps({"device": ["H100"], **{name: [1.0] for name in names}}))
    columns: dict[str, Any] = {name: np.ones(1) for name in names}
    np.savez(tmp_path / "steps.npz", device=np.array(["H100"]), **columns)
    for file in ("steps.csv", "steps.json", "steps.npz"):
        assert set(read_columns(tmp_path / file, names)) == set(names)


def test_a_column_of_rows_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "steps.npz", time_s=np.ones((3, 2)))
    with pytest.raises(ConfigError, match=r"steps\.npz time_s: has 2 dimensions\. One number for each row"):
        read_columns(tmp_path / "steps.npz", ["time_s"])


def test_a_damaged_gzip_and_numbers_too_large_are_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress("\n".join([",".join(STEP_COLUMNS), *map(str, range(2000))]).encode()))
    packed[60:200] = bytes(each ^ 0x5A for each in packed[60:200])
    (tmp_path / "steps.csv.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"steps\.csv\.gz: cannot be read"):
        read_columns(tmp_path / "steps.csv.gz", ())
    (tmp_path / "steps.json").write_text(f'{{"time_s": [{10**400}]}}')
    with pytest.raises(ConfigError, match=r"steps\.json time_s\[0\]: is not a number"):
        read_columns(tmp_path / "steps.json", ["time_s"])
    (tmp_path / "steps.json").write_text(f'{{"time_s": [{"1" * 5000}]}}')
    with pytest.raises(ConfigError, match=r"steps\.json: cannot be read as JSON"):
        read_columns(tmp_path / "steps.json", ())


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("num_decodes,seconds", "1,0.1", "has no column 'time_s'"),
        ("{all},time_s", "", "has no rows"),
        ("{all},time_s", "1,10,0,0,0,0", "has a time that is not positive"),
        ("{all},time_s", "-1,10,0,0,0,0.1", r"num_decodes\[0\]: has a negative number \(-1\)"),
        (
            "{all},time_s",
            "0.5,10,0,0,0,0.1",
            r"num_decodes\[0\]: is not a count \(0.5\). Allowed: whole numbers from 0",
        ),
        ("{all},time_s", "1e30,10,0,0,0,0.1", r"num_decodes\[0\]: is not a count \(1e\+30\)"),
        ("{all},time_s", "0,0,1,1e15,0,0.1", r"prefill_attention_pairs\[0\]: is not a count"),
        ("{all},time_s", "1,10,0,0,0,x", r"steps\.csv:2 time_s: is not a number"),
    ],
)
def test_broken_tables_of_steps_say_what_and_where(tmp_path: Path, header: str, row: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(header.replace("{all}", ",".join(STEP_COLUMNS)) + f"\n{row}\n")
    with pytest.raises(ConfigError, match=message):
        ProfiledConfig(path=str(path)).build()
