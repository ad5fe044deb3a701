"""Layouts of tensor parallelism as plain data, derived or given by hand."""
