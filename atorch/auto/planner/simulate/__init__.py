"""Simulation: whole steps of a composition on fake tensors, in a fake world of the cluster's size."""
