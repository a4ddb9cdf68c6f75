"""Policies and presets that follow other systems."""
