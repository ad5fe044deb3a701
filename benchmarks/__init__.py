"""Benchmarks of atorch's claims, one file a claim."""
