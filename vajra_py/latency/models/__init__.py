"""Latency models that need no operator tables: constant, affine, roofline, fitted profile, recorded."""
