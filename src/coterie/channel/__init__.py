"""The server's way to its clients: a federation over an engine, made of stages."""
