"""Simulation: applies methods to fake tensors in a fake world of the cluster's size."""
