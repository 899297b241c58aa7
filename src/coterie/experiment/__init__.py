"""Running experiments: configuration, the round loop, checkpoints, results."""
