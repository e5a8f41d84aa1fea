"""The Lightning CLI with the key `federated:`."""
