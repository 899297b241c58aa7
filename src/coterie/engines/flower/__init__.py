"""Real federations on Flower: the engine, Flower's processes, the gate, and the keys."""
