"""Readers of the folders that runs have left, finished or not. No file is trusted, and nothing here trains.

`contents` describes the settings and files that made a folder.
"""
