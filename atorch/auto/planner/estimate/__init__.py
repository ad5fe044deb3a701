"""Estimates of compositions by arithmetic: their scores, their uncertainty, and the ranking that follows."""
