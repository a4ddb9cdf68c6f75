"""Run random worlds until so many steps are simulated, and say which failed: python -m tests.sim.run_worlds --first 0 --steps 1000000."""

from __future__ import annotations

import argparse
import sys

from tests.sim.everything import check_world


def main() -> int:
    """Exit code 1 if a world failed; all others are run nevertheless."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world; the others follow it")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of replicas, those of all runs of a world")
    parser.add_argument("--requests", type=int, default=40, help="requests of a world")
    parser.add_argument("--overlaps", action="store_true", help="send KV while its prompt is computed")
    parser.add_argument("--agents", action="store_true", help="programs, adapters, drafts, tiers and retention too")
    parser.add_argument("--policies", action="store_true", help="any built-in prioritizer and replica scheduler")
    parser.add_argument("--swaps", action="store_true", help="policies that are replaced, and drains by migration")
    options = parser.parse_args()
    seed, num_steps, failed = options.first, 0, []
    while num_steps < options.steps:
        try:
            ways = {name: getattr(options, name) for name in ("overlaps", "agents", "policies", "swaps")}
            num_steps += check_world(seed, options.requests, **ways)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        seed += 1
        if (seed - options.first) % 100 == 0:
            print(f"{seed - options.first} worlds, {num_steps:,} steps, {len(failed)} failed", flush=True)
        if len(failed) > 20:
            break
    print(f"worlds {options.first} to {seed - 1}: {num_steps:,} steps, {len(failed)} failed {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
