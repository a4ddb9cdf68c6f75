"""Execution of experiments: runs, sweeps, atlases, capacity searches, comparisons with measured runs, and profiles."""
