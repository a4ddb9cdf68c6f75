"""Run experiments into folders: one run, sweeps, divided runs, recorded sessions, replays."""
