"""Latency models that need no operator tables: constant, roofline, fitted profile, table, recorded."""
