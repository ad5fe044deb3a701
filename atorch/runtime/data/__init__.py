"""Data loading for each rank: loaders, sharded streams, and splitting of batches."""
