"""Privacy in the channel: secure aggregation, differential privacy, and what they refuse."""
