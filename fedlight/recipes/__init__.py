"""Recipes: pipelines from the first stage to a table of results.

`load` reads a recipe, `run` runs its stages; each `Stage` is a Lightning command or a function. `followers` are the further
processes of a recipe. Functions for stages are in `steps`, `voters`, `polis`, `vote_baselines`, `method_table` and
`domain_table`.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"Stage": "stages", "load": "recipe", "run": "recipe"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
