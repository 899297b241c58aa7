"""Compression: codecs, and the stage that applies them."""
