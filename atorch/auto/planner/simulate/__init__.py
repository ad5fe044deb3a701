"""Simulation: methods applied for real to fake tensors in a fake world of the size of the cluster."""
