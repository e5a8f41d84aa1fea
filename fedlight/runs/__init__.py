"""Readers of the folders that runs have left, finished or not. No file is trusted, and nothing here trains.

`contents` describes with which settings and files a folder was made.
"""
