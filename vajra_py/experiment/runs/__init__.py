"""Execution of experiments into folders: single runs, sweeps, divided runs, recorded sessions, replays."""
