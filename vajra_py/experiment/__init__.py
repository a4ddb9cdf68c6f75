"""Execution of experiments: single runs, sweeps, capacity searches, comparisons with measured runs, and profiles."""
