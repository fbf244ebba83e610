"""First weights of a small Llama in which two layers together continue a text that has begun to repeat itself."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def set_induction_heads(model: LlamaForCausalLM, *, rope_theta: float) -> None:
    """Set the first three heads of two layers so that together they continue a text that has begun to repeat itself.

    This is the induction circuit of Olsson et al. 2022 (In-context Learning and Induction Heads): layer 0 writes down
    which token came one and two places before; layer 1 looks for earlier places that followed the present token, and
    passes on what stood there. Models of this size find it only after some millions of tokens, more than a minute
    holds; begun here, training shapes it to the text. The figures were found by trial, they are starting values only.
    """
    size, width = model.config.hidden_size, model.config.hidden_size // model.config.num_attention_heads
    half, embedding_std = width // 2, 0.5
    embeddings = model.model.embed_tokens.weight.normal_(0, embedding_std)
    embeddings[:, 0] = 4 * embedding_std  # a constant that a head can look by position with
    model.model.norm.weight.fill_(0.1)  # keeps the first logits small although the embeddings are large
    rotated = torch.zeros(size, size)
    rotated[1:, 1:] = torch.linalg.qr(torch.randn(size - 1, size - 1))[0]
    content = rotated[1:].split(width)  # rows: directions of what a token is
    written = torch.linalg.qr(torch.randn(size, size))[0].split(width)  # rows: where layer 0 notes earlier tokens
    turns = rope_theta ** (-torch.arange(half) / half)  # radians a place, as rotary embeddings turn each pair
    fast = 1.9 * (torch.arange(half) < half * 3 // 8)
    slow = 3.0 * (torch.arange(half) >= half // 2).repeat(2).unsqueeze(1)
    for head, (places, what) in enumerate([(1, 0), (1, 1), (2, 0)]):
        query, key = torch.zeros(width, size), torch.zeros(width, size)
        key[:half, 0] = fast
        query[:, 0] = torch.cat([fast * torch.cos(places * turns), -fast * torch.sin(places * turns)])
        output = embedding_std * written[head].T
        _set_head(model, layer=0, head=head, query=query, key=key, value=content[what], output=output)
    matches = [(content[0], written[0]), (content[1], written[1]), (written[0], written[2])]
    for head, (query, key) in enumerate(matches):
        output = 8 * embedding_std * content[head].T
        _set_head(model, layer=1, head=head, query=slow * query, key=slow * key, value=content[head], output=output)


def _set_head(
    model: LlamaForCausalLM,
    *,
    layer: int,
    head: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Give one head these weights: query, key and value [width, size], output [size, width]."""
    attention = model.model.layers[layer].self_attn
    rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
    attention.q_proj.weight[rows] = query
    attention.k_proj.weight[rows] = key
    attention.v_proj.weight[rows] = value
    attention.o_proj.weight[:, rows] = output
