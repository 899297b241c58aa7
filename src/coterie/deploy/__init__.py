"""A real federation: what serves it, what joins it, and what they agree on."""
