"""One file per federated algorithm, and what two of them share: candidates of synthetic data, grouping by losses."""
