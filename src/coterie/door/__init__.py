"""The door between server and clients: wire format, ledger, versions of client state."""
