"""LightningDataModules of fedlight, imported as ``fedlight.datamodules``.

`federated` and `clients` assign examples to clients and stream them visit after visit; `rows`, `text` and `vectors` read and
encode them; `preferences`, `instructions` and `synthesis` are the datamodules of the papers.
"""
