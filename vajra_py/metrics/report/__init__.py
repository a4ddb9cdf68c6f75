"""HTML reports, figures in files and timelines."""
