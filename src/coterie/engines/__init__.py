"""Engines: where clients run, and how the server's orders reach them."""
