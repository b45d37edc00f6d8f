"""Handwritten digits in plain PyTorch: the loop that paceline_loop.py makes parallel.

python examples/plain_loop.py
"""

from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

stored = np.load(files("paceline.jobs") / "digits.npz")
images = torch.from_numpy(stored["images"]).flatten(1).float() / 16
labels = torch.from_numpy(stored["labels"]).long()
train, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(train, batch_size=50, shuffle=False)  # unshuffled, so that both loops see the same batches

for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss of the last batch {loss.item():.6f}")

with torch.no_grad():
    x, y = held_out.tensors
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"held-out accuracy {accuracy:.4f}")
