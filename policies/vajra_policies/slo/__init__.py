"""Policies that serve requests by their SLOs, and helpers that they share."""
