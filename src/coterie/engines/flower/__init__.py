"""Real federations on Flower: its processes, the gate before them, and the keys."""
