"""Ask before training: do the clients fall into groups, and does training them separately pay?"""

import coterie
from coterie.data import build_population, load

# Handwritten digits over twelve clients. In one half of them all images are upside down.
population = build_population(
    load("digits"), clients=12, partition="iid", shift="rotation", shift_params={"groups": 2}
)

# Every client represents itself twice, from two halves of its data. There are groups if one half
# predicts the other. A short trial then tells whether groups have a lower loss than one model.
answer = coterie.find_groups(population, model="mlp", lr=0.1)
print(answer.verdict)
for group, members in answer.members.items():
    print(f"group {group}: clients {members}")

# Use the groups: FedAvg inside each of them, compared with one model for all clients.
groups = [answer.groups[client] for client in range(12)]
grouped = coterie.simulate(
    population, method=coterie.known_groups(groups=groups), rounds=10, lr=0.1
)
one = coterie.simulate(population, method="fedavg", rounds=10, lr=0.1)
print(f"accuracy in groups {grouped.accuracy:.3f}, with one model {one.accuracy:.3f}")
