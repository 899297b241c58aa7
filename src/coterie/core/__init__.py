"""The core: how a federated run goes on, whatever the method, the engine and the clients are."""
