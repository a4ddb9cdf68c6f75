"""Requests as the mechanism keeps them: state, transitions, the decode pool and the running set."""
