"""Claims of the library: their policies and tests exist, and a simulation that was done is never done again."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import claims
import predictors
import pytest
from claims_parts import Cell, Cells, Claim, Verdict, difference, ordered

import vajra_policies
from vajra_py.contract import Layer, PolicySpec
from vajra_py.latency.services.output_length import UnansweredLengths
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload.request import PromptContent, RequestSpec

OFFERED = (
    vajra_policies.vajra_policies(),
    vajra_policies.vajra_retention_policies(),
    vajra_policies.vajra_admission_policies(),
    vajra_policies.vajra_scalers(),
)
NAMES = {spec.name for specs in OFFERED for spec in specs}
SYSTEMS = {"vllm_v1", "nano_vllm", "minivllm", "nano_vllm_rs", "orca"}
"""Schedulers of other systems: held against recorded decisions of these (docs/evidence/systems.md)."""


def test_every_policy_has_a_claim_and_claims_name_tests_that_exist(repository_root: Path) -> None:
    assert set(claims.policies()) == NAMES - SYSTEMS
    for claim in claims.CLAIMS:
        assert claim.grade in (1, 2, 3)
        assert (claim.check is None) == bool(claim.test), claim
        assert not claim.test or (repository_root / claim.test).is_file()
        assert claim.check is None or not any(mark in claim.text + claim.paper for mark in "|\n")
    assert max(Counter((claim.policy, claim.text) for claim in claims.CLAIMS).values()) == 1


def test_the_page_has_every_claim(repository_root: Path) -> None:
    page = (repository_root / "docs" / "policy-library.md").read_text(encoding="utf-8")
    rows = page.partition(claims.FIRST)[2].partition(claims.LAST)[0].strip().splitlines()[2:]
    found = [tuple(part.strip() for part in row.split("|")[1:3]) for row in rows]
    assert found == [(claims.link_of(one), one.text) for one in claims.CLAIMS]


def test_the_page_has_a_curve_for_every_policy_that_asks_for_lengths(repository_root: Path) -> None:
    page = (repository_root / "docs" / "policy-library.md").read_text(encoding="utf-8")
    table = page.partition(predictors.FIRST)[2].partition(predictors.LAST)[0]
    assert re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE) == list(predictors.CURVES)
    asking = {spec.name for spec in vajra_policies.vajra_policies() if asks_for_lengths(spec.load())}
    assert {"srpt", "preble_e2", "blendserve"} <= asking <= set(predictors.CURVES)


def asks_for_lengths(spec: PolicySpec) -> bool:
    """True if the policy asks for output lengths in a run of requests that share prefixes."""
    layers = {
        Layer.REQUEST_PRIORITIZER: "lrs",
        Layer.REPLICASET_SCHEDULER: "round_robin",
        Layer.REPLICA_SCHEDULER: "fixed_chunk",
        spec.layer: spec.name,
    }
    asked: set[str] = set()
    lengths = UnansweredLengths(spec.name, asked)
    options = HarnessOptions(num_replicas=2, prefix_cache=PrefixCacheOptions(), output_lengths=lengths)
    contents = [PromptContent((("shared", 32), (f"own{index}", 16))) for index in range(3)]
    specs = [
        RequestSpec(f"r{index}", 0.0, 48, 2, content=content, program_id="p") for index, content in enumerate(contents)
    ]
    Harness(*layers.values(), options).run(specs)
    return bool(asked)


def test_what_was_simulated_is_kept_and_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def make(seed: int) -> Cell:
        made.append(seed)
        return {"mean": float(seed)}

    assert Cells(tmp_path).column("one", "mean", make, (3, 4)) == [3.0, 4.0]
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text(encoding="utf-8") + '{"name": "one, seed 5", "ce', encoding="utf-8")
    assert Cells(tmp_path).column("one", "mean", make, (3, 4, 5)) == [3.0, 4.0, 5.0]
    assert made == [3, 4, 5]
    assert Cells(tmp_path).column("one", "mean", make, (5,)) == [5.0]


def test_an_order_holds_from_two_standard_errors_on() -> None:
    low, high = [1.0, 2.0, 3.0, 4.0, 5.0], [1.5, 2.4, 3.6, 4.5, 5.5]
    assert difference(high, low).mean == pytest.approx(0.5)
    assert ordered({"low": low, "high": high}).holds, "paired: the seeds' own differences do not count"
    assert not ordered({"high": high, "low": low}).holds
    assert not ordered({"low": low, "same": [1.1, 1.8, 3.2, 3.9, 5.0]}).holds


def test_a_claim_that_does_not_come_out_says_why() -> None:
    claim = Claim("vtc", "something", "twice", 2, lambda cells: Verdict(True, ""), why="memory was short")
    row = claims.table([(claim, Verdict(False, "once", "a is not below b"))]).splitlines()[-1]
    assert "**does not hold**: memory was short" in row
    assert "`make claims POLICY=vtc`" in row
