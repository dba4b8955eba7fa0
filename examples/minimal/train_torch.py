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
start = loaderd.Position()
if os.path.exists(file):
    saved = torch.load(file)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    start = loaderd.Position.from_json(saved["position"])  # what comes next
schema = loaderd.schemas.chess_eval()
if start.epoch < epochs:
    with loaderd.Loader(shards, schema, batch_size=512, epochs=epochs, start=start) as loader:
        for board, score in loaderd_torch.batches(loader, structure=("board", "score")):  # on a GPU: device="cuda"
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(board)[:, 0], score).backward()
            optimizer.step()
            if loader.position.batch % 20 == 0:  # and behind each epoch
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "position": loader.position.to_json()}, f"{file}.new")
                os.replace(f"{file}.new", file)
