"""Metrics, history and live figures of a server."""
