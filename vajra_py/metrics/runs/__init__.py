"""Finished runs: read their folders, compare configurations, group replications, and find runs that repeat another one."""
