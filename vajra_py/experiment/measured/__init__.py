"""Comparison of simulations with measured runs, and calibration of step times to them."""
