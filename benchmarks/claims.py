"""Hold the built-in policies against what their papers claim, and write the table of docs/policy-library.md.

python benchmarks/claims.py [--policy vtc] [--workers 2] [--folder runs/claims]

Simulations that are done are kept in the folder, by a digest of the sources: a run that was cut off goes on where it stopped. With
`--policy` the claims of one policy are checked and printed, and the page stays as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import claims_adapters
import claims_basics
import claims_blend
import claims_chunking
import claims_drafts
import claims_experience
import claims_fairness
import claims_offline
import claims_prefixes
import claims_programs
import claims_routing
import claims_size
import claims_slo
import claims_slo_targets
from claims_parts import ROOT, Cells, Claim, Verdict

PAGE = ROOT / "docs" / "policy-library.md"
FIRST, LAST = "<!-- claims: written by make claims -->", "<!-- end of claims -->"
CLAIMS: list[Claim] = [
    *claims_fairness.CLAIMS,
    *claims_size.CLAIMS,
    *claims_prefixes.CLAIMS,
    *claims_programs.CLAIMS,
    *claims_slo.CLAIMS,
    *claims_experience.CLAIMS,
    *claims_chunking.CLAIMS,
    *claims_drafts.CLAIMS,
    *claims_adapters.CLAIMS,
    *claims_routing.CLAIMS,
    *claims_offline.CLAIMS,
    *claims_slo_targets.CLAIMS,
    *claims_blend.CLAIMS,
    *claims_basics.CLAIMS,
]


def policies() -> list[str]:
    """Policies with claims, in the order of the table."""
    return list(dict.fromkeys(claim.policy for claim in CLAIMS))


def verdicts_of(policy: str, folder: Path) -> list[Verdict]:
    """Check every claim of a policy, in the order of the table."""
    cells = Cells(folder / policy)
    return [_verdict(claim, cells) for claim in CLAIMS if claim.policy == policy]


def _verdict(claim: Claim, cells: Cells) -> Verdict:
    return _tested(claim.test) if claim.check is None else claim.check(cells)


@cache
def _tested(test: str) -> Verdict:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or ["pytest failed"]
    return Verdict(done.returncode == 0, "a test", "" if done.returncode == 0 else lines[-1])


def table(claims: Sequence[tuple[Claim, Verdict]]) -> str:
    """The claims as a table in Markdown."""
    rows = ["| policy | claim | paper | ours | grade | command | verdict |", "|---|---|---|---|--:|---|---|"]
    for claim, verdict in claims:
        command = f"`pytest {claim.test}`" if claim.test else f"`make claims POLICY={claim.policy}`"
        outcome = "holds" if verdict.holds else f"**does not hold**: {claim.why or verdict.reason}"
        rows.append(
            f"| {link_of(claim)} | {claim.text} | {claim.paper} | {verdict.ours} | {claim.grade} | {command} | {outcome} |"
        )
    return "\n".join(rows)


def link_of(claim: Claim) -> str:
    """Link to the card of its policy."""
    return f"[`{claim.policy}`]({claim.card or f'reference/policies.md#{claim.policy}'})"


def write_page(text: str) -> None:
    """Put the table into the page, in the place of the last one."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(FIRST)
    _, _, after = rest.partition(LAST)
    PAGE.write_text(f"{before}{FIRST}\n\n{text}\n\n{LAST}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Check, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", choices=policies())
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "claims")
    options = parser.parse_args(arguments)
    chosen = [options.policy] if options.policy else policies()
    begun = time.monotonic()
    found: list[tuple[Claim, Verdict]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        pending = {policy: pool.submit(verdicts_of, policy, options.folder) for policy in chosen}
        for policy, future in pending.items():
            claims = [claim for claim in CLAIMS if claim.policy == policy]
            for claim, verdict in zip(claims, future.result(), strict=True):
                found.append((claim, verdict))
                outcome = "holds" if verdict.holds else f"DOES NOT HOLD ({verdict.reason})"
                print(f"{claim.policy}, grade {claim.grade}: {claim.text}: {verdict.ours}: {outcome}", flush=True)
    print(f"{sum(one.holds for _, one in found)} of {len(found)} claims hold, {time.monotonic() - begun:.0f} s")
    if not options.policy:
        write_page(table(found))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
