"""Parts that several methods share: their checks, their base classes, and the defaults that complete a strategy."""
