"""What a federated run consists of, whatever the method, the engine and the clients."""
