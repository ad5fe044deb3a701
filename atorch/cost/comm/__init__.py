"""Costs of communication: collectives, bucketed exchanges, model splits and transfers to the host."""
