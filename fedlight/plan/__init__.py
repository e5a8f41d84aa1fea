"""Forecast of memory, time and bytes of a run."""
