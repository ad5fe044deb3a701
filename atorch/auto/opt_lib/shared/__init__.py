"""Parts that several methods share: checks, base classes, and the defaults that complete a strategy."""
