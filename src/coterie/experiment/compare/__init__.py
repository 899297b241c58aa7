"""Several runs on the same clients, side by side."""
