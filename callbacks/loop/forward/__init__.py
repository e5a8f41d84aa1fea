"""Visits that are trained by forward passes alone.

`forward_visits` says which visits of a run these are and what they weigh, `forward_steps` trains a group of them, and
`refusals` holds what cannot be trained so.
"""
