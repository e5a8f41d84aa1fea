"""Visits of a round that are trained side by side.

`bundles` forms the groups, `side_by_side` trains one, `at_once` finds their size, and `refusals` refuses runs that cannot
be trained so.
"""
