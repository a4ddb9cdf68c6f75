"""Transfers over links: closed forms, fairness, conservation, order."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vajra_py.config import LinksConfig
from vajra_py.runtime.movement import LinkOptions, Network
from vajra_py.runtime.support.clock import TICKS_PER_SECOND as SECOND

MB = 10**6
GB = 10**9


def drained(network: Network, now: int = 0) -> dict[Any, int]:
    """Let every transfer end; the tick of each."""
    ends: dict[Any, int] = {}
    while (tick := network.next_change()) is not None:
        assert tick >= now
        now = tick
        ends.update(dict.fromkeys(network.ended(now), now))
    assert not len(network)
    return ends


def near(tick: int, seconds: float | Fraction) -> bool:
    """Not early, and at most a few ticks late."""
    return 0 <= tick - Fraction(seconds) * SECOND <= 4


# Closed forms


@pytest.mark.parametrize("contention", ["max_min", "none", "fixed_share", "exclusive"])
def test_a_transfer_that_is_alone_takes_latency_and_bytes_by_bandwidth(contention: Any) -> None:
    network = Network(LinkOptions(bandwidth=50 * GB, latency_ticks=SECOND // 1000, contention=contention))
    network.start("a", 0, 1, 1000 * 131072, now=7)
    assert drained(network, 7) == {"a": 7 + 3_621_440_000}


@pytest.mark.parametrize("num_transfers", [1, 2, 3, 7])
def test_equal_transfers_of_one_source_share_its_link(num_transfers: int) -> None:
    network = Network(LinkOptions(bandwidth=GB))
    for number in range(num_transfers):
        network.start(number, 0, 1 + number, 30 * MB, now=0)
    assert network.rate(0) == pytest.approx(GB / num_transfers)
    ends = drained(network)
    assert list(ends) == list(range(num_transfers))
    assert all(near(end, Fraction(30 * num_transfers, 1000)) for end in ends.values())


def test_staggered_starts_by_hand() -> None:
    """100, 100 and 20 MB at 0, 50 and 100 ms over 1 GB/s.

    a alone to 50 ms (50 MB left); a, b halve it to 100 ms (25, 75 left); in thirds c ends at 160 ms (a 5, b 55); halves: a ends
    at 170 ms (b 50); b alone ends at 220 ms.
    """
    network = Network(LinkOptions(bandwidth=GB))
    network.start("a", 0, 1, 100 * MB, now=0)
    network.start("b", 0, 2, 100 * MB, now=SECOND // 20)
    network.start("c", 0, 3, 20 * MB, now=SECOND // 10)
    assert network.remaining_bytes("a", SECOND // 10) == 25 * MB
    assert network.remaining_bytes("b", SECOND // 10) == 75 * MB
    ends = drained(network, SECOND // 10)
    assert list(ends) == ["c", "a", "b"]
    assert near(ends["c"], Fraction(160, 1000))
    assert near(ends["a"], Fraction(170, 1000))
    assert near(ends["b"], Fraction(220, 1000))


def test_what_one_link_holds_back_goes_to_others() -> None:
    """Two into 1; another out of 0: 0->1 and 2->1 get a half each of 1's link in, and 0->3 the other half of 0's link out."""
    network = Network(LinkOptions(bandwidth=GB, shared_bandwidth=10 * GB))
    network.start("0>1", 0, 1, GB, now=0)
    network.start("2>1", 2, 1, GB, now=0)
    network.start("4>1", 4, 1, GB, now=0)
    network.start("0>3", 0, 3, GB, now=0)
    third = pytest.approx(GB / 3)
    assert [network.rate(one) for one in ("0>1", "2>1", "4>1", "0>3")] == [
        third,
        third,
        third,
        pytest.approx(GB * 2 / 3),
    ]


def test_a_fabric_is_shared_by_all() -> None:
    network = Network(LinkOptions(bandwidth=GB, shared_bandwidth=1.5 * GB))
    for number in range(3):
        network.start(number, number, 10 + number, 100 * MB, now=0)
    assert network.rate(1) == pytest.approx(GB / 2)
    network.cancel(1, now=0)
    assert network.rate(0) == pytest.approx(0.75 * GB)
    network.cancel(2, now=0)
    assert network.rate(0) == GB  # its own link is the limit now


def test_both_directions_of_a_link_are_apart() -> None:
    network = Network(LinkOptions(bandwidth=GB))
    network.start("there", 0, 1, GB, now=0)
    network.start("back", 1, 0, GB, now=0)
    assert drained(network) == {"there": SECOND, "back": SECOND}


def test_without_contention_nothing_slows_down() -> None:
    network = Network(LinkOptions(bandwidth=GB, shared_bandwidth=2 * GB, contention="none"))
    for number in range(6):
        network.start(number, 0, 1, GB, now=0)
    assert drained(network) == dict.fromkeys(range(6), SECOND)


def test_a_fixed_share_is_not_worked_out_again() -> None:
    """The second gets a half for all its life, although the first ends early; the first keeps all of the bandwidth."""
    network = Network(LinkOptions(shared_bandwidth=GB, latency_ticks=SECOND, contention="fixed_share"))
    network.start("a", 0, 1, GB, now=0)
    network.start("b", 2, 3, GB, now=SECOND)
    assert drained(network, SECOND) == {"a": 2 * SECOND, "b": 4 * SECOND}


def test_exclusive_links_take_transfers_in_order_of_start() -> None:
    network = Network(LinkOptions(bandwidth=GB, contention="exclusive"))
    network.start("a", 0, 1, GB, now=0)
    network.start("b", 0, 2, GB, now=0)  # waits for 0's link out
    network.start("c", 3, 2, GB, now=0)  # behind b on 2's link in, although that is idle
    network.start("d", 4, 5, GB, now=0)
    assert [network.rate(one) for one in "abcd"] == [GB, 0, 0, GB]
    assert drained(network) == {"a": SECOND, "d": SECOND, "b": 2 * SECOND, "c": 3 * SECOND}


def test_who_waits_for_an_exclusive_link_goes_on_when_the_one_before_is_cancelled() -> None:
    network = Network(LinkOptions(bandwidth=GB, contention="exclusive"))
    network.start("a", 0, 1, GB, now=0)
    network.start("b", 0, 2, GB, now=0)
    network.cancel("a", now=SECOND // 2)
    assert drained(network, SECOND // 2) == {"b": 3 * SECOND // 2}


def test_cancelling_gives_the_share_back() -> None:
    network = Network(LinkOptions(bandwidth=GB))
    network.start("a", 0, 1, GB, now=0)
    network.start("b", 0, 2, GB, now=0)
    network.cancel("b", now=SECOND)
    assert drained(network, SECOND) == {"a": 3 * SECOND // 2}


def test_a_latency_holds_no_bandwidth() -> None:
    network = Network(LinkOptions(bandwidth=GB, latency_ticks=SECOND))
    network.start("a", 0, 1, GB, now=0)
    network.start("b", 0, 2, GB, now=SECOND)
    assert network.rate("a") == GB
    assert network.rate("b") == 0
    assert drained(network, SECOND) == {"a": 2 * SECOND, "b": 3 * SECOND}


def test_no_bytes_arrive_after_the_latency() -> None:
    network = Network(LinkOptions(bandwidth=GB, latency_ticks=5))
    network.start("full", 0, 1, GB, now=0)
    network.start("empty", 0, 1, 0, now=10)
    assert network.next_change() == 15
    assert network.ended(15) == ["empty"]


def test_without_limits_transfers_end_after_the_latency() -> None:
    for contention in ("max_min", "none", "fixed_share", "exclusive"):
        network = Network(LinkOptions(latency_ticks=5, contention=contention))
        network.start("a", 0, 1, 10**15, now=0)
        assert drained(network) == {"a": 5}
    network = Network()
    network.start("a", 0, 1, 10**15, now=3)
    assert network.rate("a") == inf
    assert network.next_change() == 3
    assert network.remaining_bytes("a", 3) == 0
    assert network.ended(3) == ["a"]


def test_mean_sojourn_of_poisson_arrivals_is_that_of_processor_sharing() -> None:
    """M/M/1-PS: a transfer that takes x alone takes x / (1 - load) in the mean, whatever x is (Kleinrock 1967)."""
    random = np.random.default_rng(3)
    mean_s, load, count = 0.01, 0.7, 60_000
    arrivals = np.cumsum(random.exponential(mean_s / load, count))
    sizes = random.exponential(mean_s * GB, count)
    network = Network(LinkOptions(shared_bandwidth=GB))
    took, started = np.zeros(count), dict[Any, int]()
    number = 0
    while number < count or len(network):
        change = network.next_change()
        arrives = int(arrivals[number] * SECOND) if number < count else None
        if arrives is not None and (change is None or arrives < change):
            network.start(number, number, number + count, int(sizes[number]) + 1, arrives)
            started[number] = arrives
            number += 1
        else:
            assert change is not None
            for one in network.ended(change):
                took[one] = (change - started.pop(one)) / SECOND
    assert took.mean() == pytest.approx(mean_s / (1 - load), rel=0.04)
    by_size = np.argsort(sizes)
    for tenth in np.array_split(by_size, 10):
        assert took[tenth].mean() == pytest.approx(sizes[tenth].mean() / GB / (1 - load), rel=0.08)


# Bytes that become available while they are sent


@pytest.mark.parametrize("contention", ["max_min", "none", "fixed_share", "exclusive"])
@pytest.mark.parametrize("transfer_s", [0.01, 0.4, 1.0, 3.0])
def test_what_is_left_after_computing_layer_by_layer(contention: Any, transfer_s: float) -> None:
    """X / L behind computing if X <= T, else X - T (1 - 1 / L); the latency comes on top."""
    latency, num_layers = SECOND // 100, 32
    network = Network(LinkOptions(bandwidth=GB, latency_ticks=latency, contention=contention))
    network.open("a", 0, 1, now=5)
    network.release("a", int(transfer_s * GB), 5, SECOND, num_layers)
    network.close("a", now=5 + SECOND)
    left_s = transfer_s / num_layers if transfer_s <= 1 else transfer_s - (1 - 1 / num_layers)
    assert drained(network, 5 + SECOND) == {"a": pytest.approx(5 + SECOND + latency + left_s * SECOND, abs=64)}


def test_who_has_nothing_to_send_leaves_its_share_to_others() -> None:
    """a sends 100 MB in each of two halves of a second, b 1000 MB: it has all of the link but for 2 x 200 ms."""
    network = Network(LinkOptions(bandwidth=GB))
    network.open("a", 0, 1, now=0)
    network.release("a", 200 * MB, 0, SECOND, 2)
    network.start("b", 0, 2, 1000 * MB, now=0)
    assert (network.rate("a"), network.rate("b")) == (0, GB)
    assert network.remaining_bytes("a", SECOND * 6 // 10) == 150 * MB
    assert network.rate("b") == GB / 2
    assert network.remaining_bytes("b", SECOND) == 100 * MB
    network.close("a", now=SECOND)
    assert drained(network, SECOND) == {"b": 12 * SECOND // 10, "a": 12 * SECOND // 10}


def test_on_an_exclusive_link_who_waits_for_more_lets_others_go_first() -> None:
    network = Network(LinkOptions(bandwidth=GB, contention="exclusive"))
    network.open("a", 0, 1, now=0)
    network.start("b", 0, 2, GB, now=0)
    network.release("a", GB, 0, SECOND // 2)
    network.close("a", now=SECOND // 2)
    assert drained(network, SECOND // 2) == {"b": SECOND, "a": 2 * SECOND}


def test_nothing_comes_any_more_of_what_is_called_off() -> None:
    network = Network(LinkOptions(bandwidth=GB))
    network.open("a", 0, 1, now=0)
    network.release("a", GB, 0, SECOND, 10)
    network.start("b", 0, 2, GB, now=SECOND // 2)
    network.cancel("a", now=SECOND // 2)
    assert drained(network, SECOND // 2) == {"b": 3 * SECOND // 2}
    network.open("a", 0, 1, now=3 * SECOND)
    assert network.next_change() is None
    network.close("a", now=4 * SECOND)
    assert drained(network, 4 * SECOND) == {"a": 4 * SECOND}


# Properties

Started = tuple[int, int, int, int]
"""Source, target, bytes, tick."""

starts = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 3), st.integers(0, 3000), st.integers(0, 20).map(lambda at: at * SECOND // 7)
    ).filter(lambda one: one[0] != one[1]),
    min_size=1,
    max_size=12,
).map(lambda all_: sorted(all_, key=lambda one: one[3]))
sizes = st.tuples(
    st.sampled_from([None, 70.0, 1000.0]), st.sampled_from([None, 110.0, 999.5]), st.sampled_from([0, SECOND // 9])
)


def ends_of(one: Started) -> list[Any]:
    return [("out", one[0]), ("in", one[1]), "fabric"]


def fluid_ends(work: list[Started], bandwidth: float | None, shared: float | None, latency: int) -> list[Fraction]:
    """The same by exact fractions: fill all shares together, step to the next start or end, begin again."""
    return fed_ends([(one, [(one[3], one[2])]) for one in work], bandwidth, shared, latency)


def fed_ends(
    work: list[tuple[Started, list[tuple[Fraction | int, Fraction | int]]]],
    bandwidth: float | None,
    shared: float | None,
    latency: int,
) -> list[Fraction]:
    """Ends of transfers whose bytes come at several ticks each, by exact fractions."""
    to_come = [[(Fraction(at + latency), Fraction(size)) for at, size in parts] for _, parts in work]
    left = [Fraction(0)] * len(work)
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(work):
        for n, parts in enumerate(to_come):
            while parts and parts[0][0] <= now:
                left[n] += parts.pop(0)[1]
        flowing = {n: ends_of(work[n][0]) for n in range(len(work)) if left[n]}
        rates = filled(flowing, bandwidth, shared)
        for n in range(len(work)):
            if n in rates and rates[n] is None:
                left[n] = Fraction(0)
            if not left[n] and not to_come[n]:
                ends.setdefault(n, now)
        flowing = {n: links for n, links in flowing.items() if left[n]}
        later = [parts[0][0] for parts in to_come if parts]
        later += [now + left[n] / rates[n] * SECOND for n in flowing]  # type: ignore[operator]
        if not later:
            continue
        step = min(later) - now
        for n in flowing:
            left[n] -= rates[n] * step / SECOND  # type: ignore[operator]
        now += step
    return [ends[n] for n in range(len(work))]


def filled(users: dict[int, list[Any]], bandwidth: float | None, shared: float | None) -> dict[int, Fraction | None]:
    rates: dict[int, Fraction | None] = {}
    free = {
        link: Fraction(limit)
        for link in {link for links in users.values() for link in links}
        if (limit := shared if link == "fabric" else bandwidth) is not None
    }
    while True:
        open_ = [n for n in users if n not in rates]
        shares = {link: free[link] / count for link in free if (count := sum(link in users[n] for n in open_))}
        if not shares:
            return {**rates, **dict.fromkeys(open_)}
        smallest = min(shares.values())
        full = [link for link, share in shares.items() if share == smallest]
        for n in open_:
            if any(link in full for link in users[n]):
                rates[n] = smallest
                for link in users[n]:
                    if link in free:
                        free[link] -= smallest


@settings(max_examples=150, deadline=None)
@given(starts, sizes)
def test_ends_are_those_of_exact_fractions(work: list[Started], size: tuple[float | None, float | None, int]) -> None:
    bandwidth, shared, latency = size
    expected = fluid_ends(work, bandwidth, shared, latency)
    network = Network(LinkOptions(bandwidth, shared, latency))
    ends: dict[Any, int] = {}
    for number, (source, target, num_bytes, at) in enumerate(work):
        while (change := network.next_change()) is not None and change <= at:
            ends.update(dict.fromkeys(network.ended(change), change))
        network.start(number, source, target, num_bytes, at)
    ends.update(drained(network, work[-1][3]))
    for number, end in enumerate(expected):
        assert ends[number] == pytest.approx(float(end), rel=1e-6, abs=64)


def test_many_transfers_at_once_end_as_exact_fractions_say() -> None:
    """So many that ends which are no longer expected are cleared away."""
    random = np.random.default_rng(0)
    gaps, sizes_ = random.integers(0, SECOND // 40, 60), random.integers(1, 3000, 60)
    work = [(n, n + 60, int(size), int(at)) for n, (size, at) in enumerate(zip(sizes_, np.cumsum(gaps), strict=True))]
    network = Network(LinkOptions(shared_bandwidth=1000.0))
    ends: dict[Any, int] = {}
    for number, one in enumerate(work):
        while (change := network.next_change()) is not None and change <= one[3]:
            ends.update(dict.fromkeys(network.ended(change), change))
        network.start(number, *one)
    ends.update(drained(network, work[-1][3]))
    assert [ends[number] for number in range(60)] == pytest.approx(
        [float(end) for end in fluid_ends(work, None, 1000.0, 0)], rel=1e-6, abs=64
    )


feeds = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 8).map(lambda gap: gap * SECOND // 5), st.integers(1, 5)),
    max_size=4,
)
"""Bytes, ticks in which they are computed, in so many parts: one after the other."""


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(starts.map(lambda all_: all_[0]), st.none() | feeds), min_size=1, max_size=8), sizes)
def test_transfers_that_are_fed_end_as_exact_fractions_say(
    work: list[tuple[Started, list[tuple[int, int, int]] | None]], size: tuple[float | None, float | None, int]
) -> None:
    bandwidth, shared, latency = size
    network = Network(LinkOptions(bandwidth, shared, latency))
    calls: list[tuple[int, int, Any]] = []
    parts: list[list[tuple[Fraction | int, Fraction | int]]] = []
    for number, ((source, target, num_bytes, at), feed) in enumerate(work):
        if feed is None:
            calls.append((at, number, partial(network.start, number, source, target, num_bytes)))
            parts.append([(at, num_bytes)])
            continue
        calls.append((at, number, partial(network.open, number, source, target)))
        parts.append([])
        for num_released, ticks, num_parts in feed:
            release = partial(network.release, number, num_released, ticks=ticks, num_parts=num_parts)
            calls.append((at, number, release))
            part = Fraction(num_released, num_parts)
            parts[-1] += [(at + Fraction(ticks * (n + 1), num_parts), part) for n in range(num_parts) if num_released]
            at += ticks
        calls.append((at, number, partial(network.close, number)))
        parts[-1].append((at - latency, 0))  # it does not end before it is closed
        parts[-1].sort(key=lambda each: each[0])
    ends: dict[Any, int] = {}
    for at, _, call in sorted(calls, key=lambda one: one[:2]):
        while (change := network.next_change()) is not None and change <= at:
            ends.update(dict.fromkeys(network.ended(change), change))
        call(now=at)
    ends.update(drained(network, max(at for at, _, _ in calls)))
    expected = fed_ends([(one, own) for (one, _), own in zip(work, parts, strict=True)], bandwidth, shared, latency)
    for number, end in enumerate(expected):
        assert ends[number] == pytest.approx(float(end), rel=1e-6, abs=640)


@settings(max_examples=150, deadline=None)
@given(starts, sizes, st.integers(0, 40))
def test_links_are_never_overbooked_and_everyone_has_a_bottleneck(
    work: list[Started], size: tuple[float | None, float | None, int], cut: int
) -> None:
    bandwidth, shared, latency = size
    network = Network(LinkOptions(bandwidth, shared, latency))
    alive: dict[int, Started] = {}
    for number, one in enumerate(work):
        network.start(number, *one)
        alive[number] = one
        for ended in network.ended(one[3]):
            del alive[ended]  # type: ignore[arg-type]
        if number == cut and number in alive:
            network.cancel(number, one[3])
            del alive[number]
        rates = {n: network.rate(n) for n in alive if network.rate(n)}
        usage: dict[Any, list[float]] = {}
        for n, rate in rates.items():
            for link in ends_of(alive[n]):
                usage.setdefault(link, []).append(rate)
        limits = {link: shared if link == "fabric" else bandwidth for link in usage}
        for link, used in usage.items():
            assert sum(used) <= (limits[link] or inf)
        for n, rate in rates.items():
            assert rate == inf or any(
                limit is not None and sum(usage[link]) >= limit - 1e-4 and rate >= max(usage[link]) - 1e-4
                for link in ends_of(alive[n])
                if (limit := limits[link]) is not None
            )


@settings(max_examples=100, deadline=None)
@given(
    starts,
    st.sampled_from(["max_min", "none", "fixed_share", "exclusive"]),
    st.lists(st.integers(0, 10**14), max_size=20),
)
def test_asking_changes_nothing_and_bytes_only_fall(work: list[Started], contention: Any, asked: list[int]) -> None:
    plain = Network(LinkOptions(70.0, 110.0, 9, contention))
    curious = Network(LinkOptions(70.0, 110.0, 9, contention))
    questions = sorted(asked)
    told: list[tuple[int, Any]] = []
    expected: list[tuple[int, Any]] = []
    last = {number: one[2] for number, one in enumerate(work)}
    for number, one in enumerate(work):
        plain.start(number, *one)
        while questions and questions[0] <= one[3]:
            at = max(questions.pop(0), work[number - 1][3] if number else 0)
            for known in range(number):
                if known not in {each for _, each in told}:
                    left = curious.remaining_bytes(known, at)
                    assert left <= last[known]
                    last[known] = left
        curious.start(number, *one)
        assert curious.next_change() == plain.next_change()
        expected += [(one[3], each) for each in plain.ended(one[3])]
        told += [(one[3], each) for each in curious.ended(one[3])]
    while (tick := plain.next_change()) is not None:
        assert curious.next_change() == tick
        expected += [(tick, each) for each in plain.ended(tick)]
        told += [(tick, each) for each in curious.ended(tick)]
    assert told == expected
    assert sorted(each for _, each in told) == list(range(len(work)))  # type: ignore[type-var]


def test_a_change_looks_at_connected_transfers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(LinkOptions(bandwidth=GB))
    for number in range(1000):
        network.start(number, 2 * number, 2 * number + 1, GB, now=0)
    assert network.next_change() == SECOND
    looked_at: list[int] = []
    fair_rates = Network._fair_rates

    def watched(*args: Any) -> Any:
        rates = fair_rates(*args)
        looked_at.append(len(rates))
        return rates

    monkeypatch.setattr(Network, "_fair_rates", staticmethod(watched))
    network.start("new", 0, 3, GB, now=1)  # shares a link with 0 and with 1
    network.next_change()
    assert looked_at == [3]


# Bad input


def test_what_makes_no_sense_is_refused() -> None:
    network = Network(LinkOptions(bandwidth=GB))
    network.start("a", 0, 1, GB, now=10)
    with pytest.raises(ValueError, match="'a' is in flight already"):
        network.start("a", 0, 1, GB, now=10)
    with pytest.raises(ValueError, match="no link to itself"):
        network.start("b", 1, 1, GB, now=10)
    with pytest.raises(ValueError, match="negative number of bytes"):
        network.start("b", 0, 1, -1, now=10)
    with pytest.raises(ValueError, match="time goes back"):
        network.start("b", 0, 1, 1, now=9)
    with pytest.raises(ValueError, match="'a' is not open"):
        network.release("a", 1, now=10)
    with pytest.raises(ValueError, match="no transfer 'b'"):
        network.cancel("b", now=10)
    with pytest.raises(ValueError, match="no transfer 'b'"):
        network.rate("b")
    with pytest.raises(ValueError, match="bandwidth: not a bandwidth"):
        LinkOptions(bandwidth=0.0)
    with pytest.raises(ValueError, match="latency_ticks: negative"):
        LinkOptions(latency_ticks=-1)
    assert drained(network, 10) == {"a": 10 + SECOND}


def test_an_end_that_was_not_told_can_be_cancelled() -> None:
    network = Network(LinkOptions(bandwidth=GB))
    network.start("a", 0, 1, GB, now=0)
    network.cancel("a", now=2 * SECOND)
    assert network.ended(2 * SECOND) == []
    assert not len(network)


def test_the_section_of_a_file_makes_the_options() -> None:
    config = LinksConfig(bandwidth_gb_s=50.0, latency_s=0.001, contention="none", shared_bandwidth_gb_s=0.5)
    assert LinkOptions.of(config) == LinkOptions(50e9, 5e8, SECOND // 1000, "none")
    assert LinkOptions.of(LinksConfig()) == LinkOptions()


@pytest.mark.parametrize(
    "given_",
    [
        {"bandwidth_gb_s": 0.0},
        {"shared_bandwidth_gb_s": -1.0},
        {"latency_s": -0.1},
        {"contention": "fair"},
        {"gbps": 1},
    ],
)
def test_a_section_that_makes_no_sense_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(given_))):
        LinksConfig.model_validate(given_)


@pytest.mark.parametrize("name", ["bandwidth", "shared_bandwidth"])
@pytest.mark.parametrize("value", [0, 0.5, -1, float("inf"), float("nan")])
def test_what_is_no_bandwidth_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: not a bandwidth"):
        LinkOptions(**{name: value})
