"""Tables of visits, groups and clients that are written during training."""
