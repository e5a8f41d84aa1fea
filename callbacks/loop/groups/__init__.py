"""Visits of a round that are trained side by side: `bundles` forms the groups."""
