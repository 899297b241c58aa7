"""Real federations: the serving and the joining side, and what the two agree on."""
