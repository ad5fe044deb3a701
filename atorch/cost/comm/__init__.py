"""Costs of communication: collectives, buckets, model splits and transfers to the host."""
