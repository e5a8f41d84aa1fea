"""Visits of a round that are trained side by side.

`bundles` forms the groups, `side_by_side` trains one, and `refusals` says what cannot be trained so.
"""
