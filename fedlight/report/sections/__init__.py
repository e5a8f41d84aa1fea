"""Sections of a report, mostly one file per heading: ``section(runs) -> Section | None``."""
