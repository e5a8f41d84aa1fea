"""Visits that are trained by forward passes alone.

`forward_visits` selects these visits of a run and their weights, and refuses runs that cannot be trained so; `forward_steps`
trains a group of them.
"""
