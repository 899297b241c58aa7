# predict.py
import csv
import json
import sys

import torch
from safetensors.torch import load_file

from coterie.models import make_model

with open("member/model.json") as file:
    description = json.load(file)
parameters = dict(description["model"])
name, shape, classes = parameters.pop("name"), description["shape"], description["classes"]
model = make_model(name, tuple(shape), len(classes), **parameters)
model.load_state_dict(load_file("member/model.safetensors"))
model.eval()

with open(sys.argv[1]) as file:
    rows = list(csv.DictReader(file))
x = torch.tensor([[float(row[name]) for name in description["features"]] for row in rows])
if description["standardised"]:  # in the same way as this hospital's training data
    mean, std = (torch.tensor(description["standardised"][which]) for which in ("mean", "std"))
    x = (x - mean) / std
with torch.no_grad():
    probabilities, predicted = model(x).softmax(-1).max(-1)
for probability, number in zip(probabilities.tolist(), predicted.tolist(), strict=True):
    print(classes[number], f"{probability:.2f}")
