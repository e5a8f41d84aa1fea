"""What a round is: clients, algorithms, aggregation, sampling and the wire. Torch only."""
