"""One file per federated algorithm."""
