"""Recipes: stages, steps and tables of results."""
