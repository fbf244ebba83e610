"""The published training step of HRM, written plainly for the benchmark; argv: a job file. Measured by hrm.py.

As in arXiv 2506.21734 and its code: two stacks of post-norm blocks, the one-step gradient, deep supervision with a
carry, halting by Q-learning with a second forward pass for its targets, stablemax in float64, and a table of puzzle
embeddings that moves by the sign of its gradient. Attention is torch's own (SDPA), since the original's needs a GPU. It
shares no code with the kit.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def linear(inputs, outputs, *, bias=False):
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.trunc_normal_(layer.weight, std=inputs**-0.5 / 0.87962566, a=-2 * inputs**-0.5, b=2 * inputs**-0.5)
    return layer


class Block(nn.Module):
    def __init__(self, job):
        super().__init__()
        width, self.heads = job["hidden_size"], job["num_heads"]
        inner = math.ceil(round(job["expansion"] * width * 2 / 3) / job["multiple"]) * job["multiple"]
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate_up, self.down = linear(width, 2 * inner), linear(inner, width)

    def forward(self, x, turn):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = rms_norm(x + self.out(seen))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return rms_norm(x + self.down(F.silu(gate) * up))


def rotate(x, turn):
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Hrm(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.job, width = job, job["hidden_size"]
        self.tokens = nn.Embedding(job["vocab_size"], width)
        nn.init.trunc_normal_(self.tokens.weight, std=width**-0.5 / 0.87962566)
        self.prefix = math.ceil(job["puzzle_emb_dim"] / width)
        length = self.prefix + job["seq_len"]
        self.places = None
        if job["positions"] == "learned":
            self.places = nn.Embedding(length, width)
            nn.init.trunc_normal_(self.places.weight, std=width**-0.5 / 0.87962566)
        else:
            size = width // job["num_heads"]
            angles = torch.outer(torch.arange(length).float(), 1e4 ** -(torch.arange(0, size, 2) / size))
            angles = torch.cat((angles, angles), dim=-1)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        self.slow = nn.ModuleList(Block(job) for _ in range(job["h_layers"]))
        self.fast = nn.ModuleList(Block(job) for _ in range(job["l_layers"]))
        self.head, self.q_head = linear(width, job["vocab_size"]), nn.Linear(width, 2)
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.bias, -5)
        self.register_buffer("slow_start", nn.init.trunc_normal_(torch.empty(width)) / 0.87962566)
        self.register_buffer("fast_start", nn.init.trunc_normal_(torch.empty(width)) / 0.87962566)

    def run(self, blocks, state, added):
        state = state + added
        for block in blocks:
            state = block(state, None if self.places is not None else (self.cos, self.sin))
        return state

    def forward(self, states, inputs, puzzle_rows):
        """A segment: the new states, detached, scores [batch, cells, words] and Q values [batch, 2]."""
        width, job = self.job["hidden_size"], self.job
        e = self.tokens(inputs)
        if self.prefix:
            padded = F.pad(puzzle_rows, (0, self.prefix * width - puzzle_rows.shape[-1]))
            e = torch.cat((padded.view(-1, self.prefix, width), e), dim=1)
        if self.places is not None:
            e = (e + self.places.weight) * 0.5**0.5
        e = e * width**0.5
        slow, fast = states
        with torch.no_grad():
            for slow_call in range(job["h_cycles"]):
                for fast_call in range(job["l_cycles"]):
                    if (slow_call, fast_call) != (job["h_cycles"] - 1, job["l_cycles"] - 1):
                        fast = self.run(self.fast, fast, slow + e)
                if slow_call < job["h_cycles"] - 1:
                    slow = self.run(self.slow, slow, fast)
        fast = self.run(self.fast, fast, slow + e)
        slow = self.run(self.slow, slow, fast)
        return (slow.detach(), fast.detach()), self.head(slow)[:, self.prefix :], self.q_head(slow[:, 0]).float()


def stablemax_loss(scores, labels):
    """Cross entropy by stablemax in float64, [batch, cells]; 0 where the label is ignored."""
    x = scores.double()
    s = torch.where(x < 0, 1 / (1 - x), x + 1)
    log_p = torch.log(s / s.sum(-1, keepdim=True))
    seen = labels != -100
    picked = log_p.gather(-1, torch.where(seen, labels, 0)[..., None])[..., 0]
    return -torch.where(seen, picked, 0)


class Trainer:
    def __init__(self, job):
        self.job, self.model = job, Hrm(job)
        self.table = torch.zeros(job["num_puzzle_identifiers"], job["puzzle_emb_dim"])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=job["learning_rate"], betas=(0.9, 0.95), weight_decay=job["weight_decay"]
        )
        batch, length = job["batch"], self.model.prefix + job["seq_len"]
        self.states = tuple(torch.zeros(batch, length, job["hidden_size"]) for _ in range(2))
        self.steps, self.halted = torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.bool)
        self.data = {}

    def step(self, batch):
        job, model, fresh = self.job, self.model, self.halted
        self.data = {
            name: torch.where(fresh.view(-1, *[1] * (rows.ndim - 1)), rows, self.data.get(name, rows))
            for name, rows in batch.items()
        }
        states = (
            torch.where(fresh[:, None, None], model.slow_start, self.states[0]),
            torch.where(fresh[:, None, None], model.fast_start, self.states[1]),
        )
        rows = self.table[self.data["ids"]].requires_grad_()
        inputs, labels = self.data["inputs"], self.data["labels"]
        self.states, scores, q = model(states, inputs, rows)
        with torch.no_grad():
            steps = torch.where(fresh, 0, self.steps) + 1
            is_last = steps >= job["halt_max"]
            halted = is_last | (q[:, 0] > (q[:, 1] if job["q_continue"] else 0.0))
            explores = torch.rand(len(steps)) < job["halt_exploration"]
            least = torch.where(explores, torch.randint(2, job["halt_max"] + 1, (len(steps),)), 0)
            self.steps, self.halted = steps, halted & (steps >= least)
            if job["q_continue"]:
                _, _, after = model(self.states, inputs, rows)
                wanted = torch.sigmoid(torch.where(is_last, after[:, 0], after.amax(dim=1)))
            seen = labels != -100
            right = ((scores.argmax(-1) == labels) | ~seen).all(-1).float()
        cells = stablemax_loss(scores, labels).sum(-1) / seen.sum(-1).clamp(min=1)
        halting = F.binary_cross_entropy_with_logits(q[:, 0], right, reduction="sum")
        if job["q_continue"]:
            halting = halting + F.binary_cross_entropy_with_logits(q[:, 1], wanted, reduction="sum")
        loss = (cells.sum() + 0.5 * halting) / job["batch"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.move_table(rows)
        return loss.item()

    def move_table(self, rows):
        job = self.job
        ids, place = torch.unique(self.data["ids"], return_inverse=True)
        summed = torch.zeros(len(ids), rows.shape[1]).index_add_(0, place, rows.grad)
        decayed = self.table[ids] * (1 - job["puzzle_emb_lr"] * job["puzzle_emb_weight_decay"])
        self.table[ids] = decayed - job["puzzle_emb_lr"] * summed.sign()


def main(job):
    torch.manual_seed(job["seed"])
    found = {name: np.load(path) for name, path in job["arrays"].items()}
    rows = {name: torch.from_numpy(array.astype(np.int64)) for name, array in found.items()}
    trainer, told = Trainer(job), {"seconds": [], "cpu_seconds": [], "losses": []}
    for order in torch.randint(len(rows["inputs"]), (job["steps"], job["batch"])):
        batch = {name: array[order] for name, array in rows.items()}
        began, cpu_began = time.perf_counter(), time.process_time()
        told["losses"].append(trainer.step(batch))
        told["seconds"].append(time.perf_counter() - began)
        told["cpu_seconds"].append(time.process_time() - cpu_began)
    told["weights"] = sum(p.numel() for p in trainer.model.parameters())
    Path(job["out"]).write_text(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
