"""A user's own script whose last gradients wait at all sites but b for a file. Argument: FOLDER.

Each rank leaves a hash of the parameters that it ends with, which are too many for sockets to hold.
"""

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn

import isthmus

STEPS = 3
folder = Path(sys.argv[1])
site = isthmus.join(alone=True)
model = nn.Linear(4096, 4096, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
site.average_gradients(optimizer)
torch.manual_seed(1000 + site.index)
for step in range(STEPS):
    optimizer.zero_grad()
    site.count_tokens(4)
    model(torch.randn(4, 4096)).square().mean().backward()
    while step == STEPS - 1 and site.name != "b" and not (folder / "go").exists():
        time.sleep(0.05)
    if step == STEPS - 1:
        (folder / f"{site.name}.posts").touch()
    optimizer.step()
digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
(folder / f"{site.name}.hash").write_text(digest)
