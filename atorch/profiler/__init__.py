"""Tracing and measuring models."""
