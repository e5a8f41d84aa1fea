"""LightningModules of fedlight, imported as ``fedlight.modules``; they know nothing of federation."""
