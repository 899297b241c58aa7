"""Privacy, in the door: secure aggregation, noise, and what is refused."""
