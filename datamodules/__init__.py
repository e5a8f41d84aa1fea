"""LightningDataModules of fedlight, imported as ``fedlight.datamodules``: whose example is whose."""
