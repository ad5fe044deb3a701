"""Data parallelism and ZeRO-1: replicas, buckets, shards of optimizer states, and the time of gradient reduction."""
