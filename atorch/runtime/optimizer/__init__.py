"""Wrappers of users' optimizers, and tests of the splits that they support."""
