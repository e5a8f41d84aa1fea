"""Lightning callbacks of fedlight, imported as ``fedlight.callbacks``.

`loop` federates a training run; `progress`, `logs` and `export` show and write its course; `scores` and `attacks` measure.
"""
