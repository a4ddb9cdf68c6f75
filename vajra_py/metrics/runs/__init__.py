"""Finished runs read from their folders: differences of configuration, replications, copies."""
