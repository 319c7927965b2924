"""Timing, memory and traces of steps: what bench, profile and demo share."""
