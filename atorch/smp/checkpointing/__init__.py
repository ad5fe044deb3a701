"""Checkpoints of `smp`: partial and full files, folders by tag, and saves that are atomic."""
