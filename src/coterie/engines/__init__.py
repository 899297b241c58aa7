"""Engines: ways to carry orders to clients."""
