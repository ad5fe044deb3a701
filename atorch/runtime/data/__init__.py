"""Data of each process: loaders, streams, and batches in pieces."""
