"""Training data by client, batch by batch."""
