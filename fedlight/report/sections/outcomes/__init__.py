"""Sections on what methods have reached: tests, tasks and duels, and which differences between methods are beyond noise."""
