"""The federated loop and what it does in a round."""
