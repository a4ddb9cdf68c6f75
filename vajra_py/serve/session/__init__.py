"""Engine session behind a server: submissions, output streams, models by name."""
