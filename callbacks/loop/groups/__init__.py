"""Visits of a round that are trained side by side.

`side_by_side` trains a group, `at_once` finds the size of groups, and `refusals` refuses runs that cannot be trained so.
"""
