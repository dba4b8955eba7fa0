"""A training loop in PyTorch. Run again after a crash, it goes on with exactly the next batch.

python train_torch.py 'shards/*.tfrecord' checkpoint.pt
"""

import os
import sys

import loaderd_torch
import torch

import loaderd

shards, file = sys.argv[1:]
epochs = 2

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1536, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters())
with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=512) as loader:
    saving = {"net": net, "optimizer": optimizer, "loader": loader}
    if os.path.exists(file):
        for name, state in torch.load(file).items():
            saving[name].load_state_dict(state)
    batches = loaderd_torch.batches(loader, structure=("board", "score"))  # on a GPU: device="cuda"
    for _ in range(loader.position.epoch, epochs):
        for board, score in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(board)[:, 0], score).backward()
            optimizer.step()
            if loader.position.batch % 20 == 0:  # and behind each epoch
                torch.save({name: each.state_dict() for name, each in saving.items()}, f"{file}.new")
                os.replace(f"{file}.new", file)
