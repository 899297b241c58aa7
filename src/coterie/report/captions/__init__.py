"""Captions: what each picture shows, in words and numbers."""
