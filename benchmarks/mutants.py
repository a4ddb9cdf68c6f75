"""Change the source in small ways, one at a time, and find the changes that no test notices.

First every test file runs once, and it is recorded which test executes which line and how long it takes. Then each mutant is
applied to a copy of the repository in a temporary folder, and the tests that execute its line run there, in a fork of this
process, until the first one fails: those that caught other mutants and the quickest ones, then the others as far as `--budget`
allows. A mutant whose tests exceed their time limit counts as caught; one on a line that no test executes survives. Survivors
are printed for judging: some are equivalent to the original, which no program can know.

Recordings and results are kept in files. A second run with the same seed repeats nothing whose source is unchanged, except
survivors after a change of their tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mutant_copies import Copy, Job, Plan, run_tests, side_by_side
from mutations import EQUIVALENT, Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
CONTROL_S = 60.0
"""Processor time that a test which has caught a mutant may take without one, seconds."""
FIRST_TESTS = 40
"""Tests of a mutant that run before all others."""

PLAN = Plan(
    ROOT,
    {"vajra_py": "vajra_py", "vajra_policies": "policies/vajra_policies", "vajra_kernels": "kernels/vajra_kernels"},
    ("vajra_py/contract", "vajra_py/runtime", "vajra_py/sim", "policies/vajra_policies"),
    (
        "tests/config",
        "tests/golden",
        "tests/plugins",
        "tests/policies",
        "tests/runtime",
        "tests/sim",
        "tests/systems",
        "tests/testing",
    ),
    # The first two interrupt policies in the middle of a line, and of what notes that it ran; the third measures memory; the others
    # look at the collector, which has frozen objects in a fork.
    (
        "tests/plugins/test_watchdog.py",
        "tests/sim/test_sim_failures.py::test_the_error_names_the_policy_and_the_tables_are_kept"
        "[Layer.REPLICA_SCHEDULER-NeverReturns",
        "tests/testing/test_harness.py::test_counting_everything_costs_what_was_used_not_what_there_is",
        "tests/sim/test_sim_who_decides.py::test_the_garbage_collector_is_as_it_was_after_a_run",
    ),
    (
        "matplotlib.pyplot",
        "pandas",
        "pyarrow.parquet",
        "pydantic",
        "rich.console",
        "ruamel.yaml",
        "scipy.stats",
        "sortedcontainers",
    ),
)


@dataclass(slots=True)
class Recording:
    """Durations of tests, and the lines that they execute."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Test -> its duration."""
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """Source file -> line -> tests that execute it."""
    imported: dict[str, set[int]] = field(default_factory=dict)
    """Source file -> lines that are executed where it is imported."""
    digests: dict[str, str] = field(default_factory=dict)
    """Test file -> digest of its text."""

    def is_imported(self, mutant: Mutant) -> bool:
        """Return True if no test executes the mutant, but importing its module does."""
        return not self._executing(mutant) and not self.imported.get(mutant.file, set()).isdisjoint(
            {*mutant.own_lines, *mutant.statement_lines}
        )

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the mutant, quickest first; if importing does, those of its file, and all others."""
        found, others = self._executing(mutant), set[str]()
        if self.is_imported(mutant):
            found = set().union(*self.lines.get(mutant.file, {}).values())
            others = self.seconds.keys() - found
        return [test for some in (found, others) for test in sorted(some, key=lambda test: (self.seconds[test], test))]

    def _executing(self, mutant: Mutant) -> set[str]:
        lines = self.lines.get(mutant.file, {})
        own, around = (
            {test for line in some for test in lines.get(line, ())}
            for some in (mutant.own_lines, mutant.statement_lines)
        )
        return own or around

    def digest_of(self, tests: Sequence[str]) -> str:
        """Return a digest of the names of tests and the text of their files."""
        files = sorted({test.partition("::")[0] for test in tests})
        return _digest(*sorted(tests), *(self.digests[file] for file in files))


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return total.hexdigest()[:16]


def sample(plan: Plan, seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of all files of the plan (fewer if there are fewer), drawn without replacement.

    An edit of the source changes the sample by about as much as it changes the source.
    """
    paths = [path for folder in plan.sources for path in sorted((plan.root / folder).rglob("*.py"))]
    every = [m for path in paths for m in mutants_of(path.relative_to(plan.root).as_posix(), path.read_bytes())]
    return sorted(every, key=lambda mutant: random.Random(f"{seed} {mutant.key}").random())[:count]


def _read(plan: Plan, folders: Iterable[str]) -> dict[str, bytes]:
    paths = (path for folder in folders for path in sorted((plan.root / folder).rglob("*.py")))
    return {path.relative_to(plan.root).as_posix(): path.read_bytes() for path in paths}


def record(plan: Plan, folder: Path, copies: Sequence[Copy]) -> Recording:
    """Return the recording in a folder, after running the test files that have changed since (all, if others have)."""
    texts = _read(plan, plan.tests)
    files = [name for name in texts if Path(name).name.startswith("test_")]
    tests = {name: _digest(texts[name]) for name in files if name not in plan.left_out}
    helpers = (text for name, text in texts.items() if name not in files)
    base = _digest(*helpers, *_read(plan, plan.packages.values()).values())
    places = {name: folder / f"{Path(name).stem}-{_digest(base, digest)}.json" for name, digest in tests.items()}
    missing = [name for name, place in places.items() if not place.exists()]

    def job(name: str) -> tuple[str, Callable[[Copy], Job]]:
        return name, lambda copy: copy.run(partial(copy.record, name, places[name]))

    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, (result, output)) in enumerate(side_by_side(copies, map(job, missing)), 1):
        if result != "passed":
            sys.exit(f"mutants: the tests fail without a mutant.\n{output}")
        print(f"{number}/{len(missing)} recorded {name}", flush=True)

    place = folder / f"import-{base}.json"
    for _, (result, output) in side_by_side(
        copies[:1], [("", lambda copy: copy.run(partial(copy.record_import, place)))]
    ):
        if result != "passed":
            sys.exit(f"mutants: the source cannot be imported.\n{output}")
    imported = json.loads(place.read_text(encoding="utf-8"))
    found = Recording(digests=tests, imported={source: set(lines) for source, lines in imported.items()})
    for place in places.values():
        facts = json.loads(place.read_text(encoding="utf-8"))
        found.seconds |= facts["seconds"]
        names = list(facts["seconds"])
        for source, lines in facts["lines"].items():
            for line, numbers in lines.items():
                found.lines.setdefault(source, {}).setdefault(int(line), set()).update(names[n] for n in numbers)
    return found


def _first_failure(output: str) -> str:
    """Return the first test that failed, without its message."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].partition(" ")[2].partition(" - ")[0] if lines else ""


def _known(results: Path) -> dict[str, dict[str, Any]]:
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["key"]: line for line in lines}


def _stages(
    tests: Sequence[str], recording: Recording, catches: Counter[str], budget_s: float
) -> list[tuple[list[str], float]]:
    """Return the tests to run first, and the others, each with their limit in seconds."""
    # A quarter of the first ones have caught most mutants up to now.
    apt = [test for test in sorted(tests, key=lambda test: -catches[test]) if catches[test]][: FIRST_TESTS // 4]
    order = list(dict.fromkeys([*apt, *tests]))
    chosen, left_s = order[: FIRST_TESTS // 4], budget_s
    for test in order[FIRST_TESTS // 4 :]:
        left_s -= recording.seconds[test]
        if left_s > 0:
            chosen.append(test)
    stages = (chosen[:FIRST_TESTS], chosen[FIRST_TESTS:])
    return [(some, 5 + 4 * sum(map(recording.seconds.__getitem__, some))) for some in stages if some]


@dataclass(slots=True)
class _Trial:
    """Mutants to try, and what is known of them and of others."""

    recording: Recording
    results: Path
    budget_s: float
    digests: dict[str, dict[str, str]]
    screen: int
    """File descriptor for messages."""
    sound: set[str] = field(default_factory=set)
    """Tests that have caught mutants, and pass without one."""

    def warm(self, mutants: Sequence[Mutant], place: Copy) -> int:
        """Try mutants in forks of a process that has imported the source and the tests."""
        files = sorted({test.partition("::")[0] for mutant in mutants for test in self.recording.tests_of(mutant)})

        def work(run_collected: Callable[[Sequence[str]], int]) -> None:
            for mutant in mutants:
                self._try(mutant, place, run_collected)

        return place.warm(files, work)

    def cold(self, mutants: Sequence[Mutant], place: Copy) -> int:
        """Try mutants in forks that import the source anew."""
        for mutant in mutants:
            self._try(mutant, place, run_tests)
        return 0

    def _try(self, mutant: Mutant, place: Copy, run_tests: Callable[[Sequence[str]], int]) -> None:
        catches = Counter(record["by"] for record in _known(self.results).values())
        tests = self.recording.tests_of(mutant)
        job = place.try_mutant(mutant, _stages(tests, self.recording, catches, self.budget_s), run_tests)
        [(_, (result, output))] = side_by_side([place], [("", lambda _: job)])
        by = _first_failure(output)
        if by and by not in self.sound:
            # Tests that fail without a mutant, because they run in a fork beside others, catch nothing.
            [(_, control)] = side_by_side([place], [("", lambda _: place.run(partial(run_tests, [by]), CONTROL_S))])
            if control[0] != "passed":
                sys.exit(f"mutants: {by} fails without a mutant.\n{control[1]}")
            self.sound.add(by)
        facts = {name: getattr(mutant, name) for name in ("key", "file", "function", "line", "before", "after")}
        found = {"result": result, "by": by, "num_tests": len(tests), "budget_s": self.budget_s}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts | found | self.digests[mutant.key]) + "\n")
        os.write(self.screen, f"{result:8}{mutant.file}:{mutant.line} {mutant.function}\n".encode())


def run(plan: Plan, mutants: Sequence[Mutant], results: Path, workers: int, budget_s: float) -> list[dict[str, Any]]:
    """Try the mutants that are not in the results yet, append what comes out, and return the records of all."""
    # What Python compiles is kept in each copy, whatever the user's settings.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copies = [Copy(plan, Path(temporary) / str(number)) for number in range(workers)]
        for name in plan.libraries:
            importlib.import_module(name)
        recording = record(plan, results.with_name(f"{results.stem}-recording"), copies)
        digests = {
            m.key: {
                "source": _digest((plan.root / m.file).read_bytes()),
                "tests": recording.digest_of(recording.tests_of(m)),
            }
            for m in mutants
        }
        known = _known(results)

        def is_done(mutant: Mutant) -> bool:
            record, now = known.get(mutant.key, {}), digests[mutant.key]
            return record.get("source") == now["source"] and (
                record["result"] != "passed"
                or mutant.key in EQUIVALENT
                or (record["tests"] == now["tests"] and record["budget_s"] >= budget_s)
            )

        todo = [m for m in mutants if not is_done(m)]
        print(f"{len(todo)} mutants to try", flush=True)
        trial = _Trial(recording, results, budget_s, digests, os.dup(1))
        for is_cold, work in ((False, trial.warm), (True, trial.cold)):
            some = [m for m in todo if recording.is_imported(m) == is_cold]
            parts = [part for number in range(workers) if (part := some[number::workers])]
            jobs = [("", lambda copy, part=part: copy.run(partial(work, part, copy))) for part in parts]  # noqa: B023
            for _, (result, output) in side_by_side(copies, jobs):
                if result != "passed":
                    sys.exit(f"mutants: the tests cannot be run.\n{output}")
        known = _known(results)
    return [known[m.key] for m in mutants]


def report(records: Sequence[dict[str, Any]]) -> str:
    """Return the caught fraction and the survivors, those judged equivalent apart."""
    survivors = [r for r in records if r["result"] == "passed"]
    judged = [r for r in survivors if r["key"] in EQUIVALENT]
    late = sum(r["result"] == "timeout" for r in records)
    counted, caught = len(records) - len(judged), len(records) - len(survivors)
    share = f" ({caught / counted:.1%})" if counted else ""
    lines = [f"caught {caught} of {counted}{share}, {late} of them by time; {len(judged)} more judged equivalent"]
    for r in survivors:
        reason = EQUIVALENT.get(r["key"])
        tests = {"0": "no test", "1": "1 test"}.get(str(r["num_tests"]), f"{r['num_tests']} tests")
        lines += [f"{r['file']}:{r['line']} {r['function']} ({tests})", f"  - {r['before']}", f"  + {r['after']}"]
        lines += [f"  equivalent: {reason}"] if reason else []
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, plan: Plan = PLAN) -> None:
    """Try a sample of mutants and print what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--count", type=int, default=400, help="mutants to try (default 400)")
    parser.add_argument("--workers", type=int, default=1, help="mutants at once, each in a copy of its own (default 1)")
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests after the first ones (default 20)")
    parser.add_argument("--results", type=Path, default=plan.root / "runs" / "mutants.jsonl", help="file to append to")
    options = parser.parse_args(arguments)
    mutants = sample(plan, options.seed, options.count)
    print(report(run(plan, mutants, options.results.resolve(), options.workers, options.budget)))


if __name__ == "__main__":
    main()
