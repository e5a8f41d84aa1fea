"""Published numbers: where each figure of the pages comes from, and whether it still comes out of the code.

``docs/results.toml`` is written by hand: the command of every measurement, its tables, tolerances, how it is rerun.
``docs/results/NAME.json`` is written by ``benchmarks/reproduce.py record NAME``: its rows, with commit and machine. From
both the tables of the pages are written, the figures of their prose checked, and reruns compared.
"""
