"""Lightning callbacks of fedlight, imported as ``fedlight.callbacks``; the federated loop is one of them."""
