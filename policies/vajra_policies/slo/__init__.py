"""Promised times: who is served so that they are kept, and how much work a step may take."""
