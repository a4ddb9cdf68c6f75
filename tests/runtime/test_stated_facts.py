"""Facts of requests are seen by policies and spans under names that follow from their own."""

from __future__ import annotations

from vajra_py.contract import RequestView
from vajra_py.contract.facts import FACTS


def test_each_fact_is_seen_under_a_name_that_requests_have() -> None:
    for fact in FACTS:
        assert fact.seen_as != ""
        assert fact.seen_as is None or hasattr(RequestView, fact.seen_as), fact.name
    assert {fact.name for fact in FACTS if fact.seen_as == fact.name} > {"priority", "tenant", "session_id"}


def test_spans_name_a_fact_after_it_unless_it_says_otherwise() -> None:
    spans = {fact.name: fact.span for fact in FACTS}
    assert spans["priority"] == "vajra.request.priority"
    assert "" not in spans.values()


def test_durations_are_stated_in_milliseconds_over_http() -> None:
    named = {fact.name: (fact.kind.name, fact.body, fact.is_optional) for fact in FACTS}
    assert named["ttft_slo_s"] == ("DURATION", "ttft_slo_ms", True)
    assert named["priority"][1] == "priority"
    assert all((kind == "DURATION") == name.endswith("_s") for name, (kind, *_) in named.items())
