"""Requests in the mechanism: state, transitions, the decode pool and the running set."""
