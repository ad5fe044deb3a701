"""Dry runs: real steps of candidates on the processes of this job, and the choice by their times."""
