"""Wrappers of users' optimizers, and tests of what may be done to them."""
