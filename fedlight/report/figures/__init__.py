"""Figures of results, as stages of recipes and as charts of a report: each takes numbers and returns a matplotlib figure."""
