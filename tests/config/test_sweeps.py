from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.config import config_from_mapping, dump_effective, expand_sweep, load_config
from vajra_py.config.places import Place, written_at
from vajra_py.config.sweeps import short_names, sweep_points, values_of_label
from vajra_py.errors import ConfigError
from vajra_py.plugins import Registry


def points(write: Any, text: str, registry: Registry, *overrides: str) -> list[tuple[dict[str, Any], Any]]:
    return [(dict(point), config) for point, config in expand_sweep(load_config(write(text), overrides, registry))]


def test_a_grid_has_every_combination_the_last_axis_fastest(write: Any, good: str, registry: Registry) -> None:
    text = good + "sweep: {scheduling.replicaset_scheduler: [pull, round_robin], workload.rate: [4, 8]}\n"
    found = points(write, text, registry)
    assert [list(values.values()) for values, _ in found] == [
        ["pull", 4],
        ["pull", 8],
        ["round_robin", 4],
        ["round_robin", 8],
    ]
    for values, config in found:
        assert config.workload.rate == values["workload.rate"]
        assert config.scheduling.replicaset_scheduler.policy == values["scheduling.replicaset_scheduler"]
        assert config.sweep is None
        assert config.seed == 42


def test_zip_goes_side_by_side_and_multiplies_with_a_grid(write: Any, good: str, registry: Registry) -> None:
    found = points(
        write, good + "sweep: {num_replicas: [1, 2], zip: {seed: [7, 8], workload.rate: [4, 9]}}\n", registry
    )
    assert [tuple(values.values()) for values, _ in found] == [(1, 7, 4), (1, 8, 9), (2, 7, 4), (2, 8, 9)]
    assert [config.num_replicas for _, config in found] == [1, 1, 2, 2]


def test_a_list_names_its_points(write: Any, good: str, registry: Registry) -> None:
    found = points(write, good + "sweep:\n  - {seed: 1}\n  - {seed: 1, workload.rate: 2}\n", registry)
    assert [values for values, _ in found] == [{"seed": 1}, {"seed": 1, "workload.rate": 2}]
    assert [config.workload.rate for _, config in found] == [4.0, 2.0]


def test_without_a_sweep_there_is_one_point(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good), registry=registry)
    ((point, only),) = expand_sweep(config)
    assert not point
    assert only == config


def test_points_may_bring_what_the_file_lacks_and_the_first_one_stands_for_the_file(
    write: Any, good: str, registry: Registry
) -> None:
    text = good.replace(", rate: 4.0", "").replace("  replicaset_scheduler: pull\n", "")
    text += "sweep:\n  workload.rate: [3, 5]\n  scheduling.replicaset_scheduler.policy: [round_robin]\n"
    config: Any = load_config(write(text), registry=registry)
    assert config.workload.rate == 3
    assert [each.workload.rate for _, each in expand_sweep(config)] == [3, 5]  # type: ignore[union-attr]


def test_a_policys_parameters_do_not_leak_into_the_next_point(write: Any, good: str, registry: Registry) -> None:
    rest = good[good.index("workload") :]
    text = (
        f"version: 1\npreset: vllm-v1\n{rest}sweep:\n"
        "  scheduling.request_prioritizer: [lrs, fcfs, {policy: lrs, params: {deadline_multiplier: 9}}]\n"
    )
    params = [config.scheduling.request_prioritizer.params for _, config in points(write, text, registry)]
    assert [each.get("deadline_multiplier") for each in params] == [4.0, None, 9.0]


def test_overrides_reach_the_sweep(write: Any, good: str, registry: Registry) -> None:
    found = points(write, good + "sweep: {seed: [1, 2]}\n", registry, "sweep.workload.rate=[5]", "num_replicas=2")
    assert [(c.seed, c.workload.rate, c.num_replicas) for _, c in found] == [(1, 5, 2), (2, 5, 2)]
    assert len(points(write, good + "sweep: {seed: [1, 2]}\n", registry, "sweep=null")) == 1


def test_an_id_depends_on_the_values_alone(write: Any, good: str, registry: Registry) -> None:
    def ids(sweep: str) -> list[str]:
        return [point.point_id for point, _ in expand_sweep(load_config(write(good + sweep), registry=registry))]

    few = ids("sweep: {seed: [1, 2], workload.rate: [4]}\n")
    many = ids("sweep: {workload.rate: [4, 5], seed: [0, 1, 2]}\n")
    assert len(set(many)) == 6
    assert {each.rsplit("-", 1)[1] for each in few} <= {each.rsplit("-", 1)[1] for each in many}
    assert few == ids("sweep: {seed: [1, 2], workload.rate: [4]}\n")
    assert all(each.replace("-", "").replace(".", "").isalnum() for each in many)


def test_labels_are_short_and_tell_points_apart() -> None:
    layer = "scheduling.request_prioritizer"
    chosen = {"policy": "lrs", "params": {"deadline_multiplier": 2, "order": "slow"}}
    sweep = written_at(Place(), [{f"{layer}.policy": "edf", "workload.rate": 4}, {layer: chosen, "seed": None}])
    labels = [point.label for point in sweep_points(sweep, Place())[0]]
    assert labels[0].endswith("rate=4")
    assert "lrs(deadline_multiplier=2, order=slow)" in labels[1]
    assert short_names(["scheduling.request_prioritizer.policy", "scheduling.replica_scheduler.policy"]) == {
        "scheduling.request_prioritizer.policy": "request_prioritizer",
        "scheduling.replica_scheduler.policy": "replica_scheduler",
    }
    assert values_of_label(labels[1]) == "lrs(deadline_multiplier=2, order=slow) null"
    assert short_names(["a.x.rate", "b.x.rate", "a.seed"]) == {
        "a.x.rate": "a.x.rate",
        "b.x.rate": "b.x.rate",
        "a.seed": "seed",
    }


def test_an_empty_point_is_the_experiment_as_it_stands(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good + "sweep:\n  - {}\n  - {seed: 2}\n"), registry=registry)
    (baseline, plain), (other, changed) = expand_sweep(config, registry)
    assert (baseline.label, other.label) == ("baseline", "seed=2")
    assert baseline.point_id.startswith("baseline-")
    assert (plain.seed, changed.seed) == (config.seed, 2)


@pytest.mark.parametrize(
    ("sweep", "complaint"),
    [
        ("sweep: 3", "exp.yaml:12: sweep: must be a mapping or a list (got 3). Write `path: [values]`"),
        ("sweep: {}", "exp.yaml:12: sweep: has no points."),
        ("sweep: []", "exp.yaml:12: sweep: has no points."),
        ("sweep: {seed: 3}", "exp.yaml:12: sweep.seed: must be a list of values (got 3)."),
        ("sweep:\n  seed: []", "exp.yaml:13: sweep.seed: must be a list of values (got an empty list)."),
        ("sweep: {seed: [1, 1]}", "exp.yaml:12: sweep: has a point twice (seed=1)."),
        ("sweep: {seed: [1], zip: {seed: [2]}}", "sweep.seed: is swept twice."),
        ("sweep: {zip: {seed: [1], num_replicas: [1, 2]}}", "lists must be of one length (got seed: 1, num_replicas: 2)"),
        ("sweep: {zip: 3}", "exp.yaml:12: sweep.zip: must be a mapping of paths to lists"),
        ("sweep: [3]", "exp.yaml:12: sweep.0: must be a mapping of paths to values"),
        ("sweep: [{}, {}]", "exp.yaml:12: sweep: has a point twice (baseline)."),
        ("sweep: {version: [1]}", "exp.yaml:12: sweep.version: 'version' cannot be swept"),
        ("sweep: {a..b: [1]}", "sweep.a..b: is not a path"),
        ("sweep: {num_replica: [1, 2]}", "exp.yaml:12: num_replica: unknown key. Did you mean 'num_replicas'?"),
        ("sweep: {seed.x: [1, 2]}", "exp.yaml:12: sweep.seed.x: 'seed' is neither a mapping nor a list (it is 42)"),
        ("sweep:\n  workload.rate: [4, -1]", "exp.yaml:13: workload.rate: must be greater than 0 (got -1)."),
        ("sweep: {scheduling.request_prioritizer.policy: [lrs, fcfs]}", "exp.yaml:4: scheduling.request_prioritizer.params.deadline_multiplier: unknown key."),
        ("sweep: {seed: [" + ",".join(map(str, range(200))) + "], num_replicas: [" + ",".join(map(str, range(1, 52))) + "]}", "has too many points (got 10200). At most 10000."),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_a_mistake_in_a_sweep_has_its_line(
    write: Any, good: str, registry: Registry, sweep: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(good + sweep + "\n"), registry=registry)
    (line,) = str(caught.value).splitlines()
    assert complaint in line


def test_a_mistake_beside_a_sweep_is_told_once(write: Any, good: str, registry: Registry) -> None:
    text = good.replace("seed: 42", "seed: -1") + "sweep: {workload.rate: [1, 2, -3, -4]}\n"
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), registry=registry)
    assert [str(each).split(": must")[0] for each in caught.value.problems] == [
        "exp.yaml:2: seed",
        "exp.yaml:12: workload.rate",
        "exp.yaml:12: workload.rate",
    ]


def test_a_sweep_survives_its_effective_file(write: Any, good: str, registry: Registry) -> None:
    text = good + "sweep: {scheduling.request_prioritizer: [lrs, fcfs], seed: [1, 2]}\n"
    config = load_config(write(text), ["workload.rate=6"], registry)
    again = load_config(write(dump_effective(config), "again.yaml"), registry=registry)
    assert [p.point_id for p, _ in expand_sweep(again)] == [p.point_id for p, _ in expand_sweep(config)]
    for (_, before), (_, after) in zip(expand_sweep(config), expand_sweep(again), strict=True):
        assert before == after


@given(
    st.dictionaries(
        st.sampled_from(["seed", "num_replicas"]),
        st.lists(st.integers(1, 50), min_size=1, max_size=4, unique=True),
        min_size=1,
    )
)
def test_a_grid_is_the_product_of_its_axes(axes: dict[str, list[int]]) -> None:
    found, findings = sweep_points(written_at(Place(), axes), Place())
    assert not findings
    expected = 1
    for values in axes.values():
        expected *= len(values)
    assert len({point.point_id for point in found}) == expected == len(found)
    assert len({point.label for point in found}) == expected


def test_a_sweep_of_a_mapping(write: Any, good: str, registry: Registry) -> None:
    mapping = load_config(write(good), registry=registry).model_dump(mode="json")
    config = config_from_mapping({**mapping, "sweep": {"seed": [1, 2]}}, registry=registry)
    assert [each.seed for _, each in expand_sweep(config)] == [1, 2]
