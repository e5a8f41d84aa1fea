"""Two halves of the federated loop: the server's and that of a node's clients."""
