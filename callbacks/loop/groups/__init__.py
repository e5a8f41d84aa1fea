"""Visits of a round that are trained side by side.

`bundles` forms the groups, `side_by_side` trains one, `at_once` says how large they are, and `refusals` what cannot be
trained so.
"""
