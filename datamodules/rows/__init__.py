"""Rows of data sets and what is read of them."""
