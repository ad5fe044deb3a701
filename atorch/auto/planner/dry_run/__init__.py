"""Dry runs: real steps of real candidates on the processes of this job, and the choice that their times support."""
