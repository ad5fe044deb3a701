"""Explanations of a plan: its neighbours, and changes that would make a job fit."""
