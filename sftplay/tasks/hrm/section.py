"""The section `hrm`: the recurrent model of puzzles, how it learns, and how it halts (task mode hrm).

Names are those of the published code where it has some. Rules between keys are in `spec`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from sftplay.config.section import Auto, NotNegative, Positive, PositiveFloat, Section, Share, UserPath

Architecture = Literal["hrm", "single"]
TablePlacement = Literal["auto", "replicated", "sharded"]


class HrmConfig(Section):
    """The recurrent model of puzzles, see docs/puzzles.md. The defaults make the published model of 27 M weights."""

    start_from: UserPath | None = None
    """A checkpoint of HRM's or TRM's own code (a file `step_N`) whose weights the run begins with. The sizes of this
    section must be those of its model, which the file all_config.yaml next to it names. None begins with random
    weights."""

    arch: Architecture = "hrm"
    """hrm: a slow and a fast module, each with its own weights. single: one module does the work of both, as in the
    later and smaller TRM; it has l_layers blocks."""

    grad: Literal["one_step", "full_last_cycle"] = "one_step"
    """How far the gradient goes back. one_step: through the last call of each module; memory does not depend on the
    number of cycles. full_last_cycle: through all calls of the last slow cycle; better and dearer."""

    hidden_size: Positive = 512
    """Width of the model. It must be a multiple of num_heads."""

    num_heads: Positive = 8
    """Heads of the attention."""

    expansion: PositiveFloat = 4.0
    """Width of the feed-forward layers over hidden_size. Two thirds of it are used, as usual for SwiGLU."""

    h_layers: Positive = 4
    """Blocks of the slow module."""

    l_layers: Positive = 4
    """Blocks of the fast module."""

    h_cycles: Positive = 2
    """Calls of the slow module in a segment."""

    l_cycles: Positive = 2
    """Calls of the fast module before each call of the slow one."""

    positions: Literal["rope", "learned"] = "rope"
    """How the model knows the place of a cell. rope: rotary embeddings, as published. learned: an embedding of each
    cell; tiny models need it."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary embeddings."""

    n_supervision: Positive = 16
    """The most segments that a puzzle gets (halt_max). Each segment refines the answer, and each is a training step.
    1 trains a plain model: most of the accuracy comes from the repetition."""

    halt_exploration: Share = 0.1
    """Probability with which a puzzle must go on for a random number of segments, though the model would halt."""

    q_continue: bool = True
    """Learn the worth of going on besides that of halting. It takes another forward pass in each step. false: halt when
    the answer is probably right."""

    eval_halt: Literal["max", "q"] = "max"
    """Segments of the evaluation. max: all n_supervision. q: a puzzle ends where the model would halt; the figures of
    both ways are reported."""

    loss: Literal["stablemax", "softmax"] = "stablemax"
    """How scores become probabilities. stablemax is the published one."""

    loss_precision: Literal["fp64", "fp32"] = "fp64"
    """Number format of the loss. fp32 is faster, above all on a CPU."""

    epochs: PositiveFloat = 20000.0
    """Visits to each group, a puzzle with its augmented copies. Ignored when train.max_steps is given."""

    stop_at_exact: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop when this share of the training puzzles that ended since the last line of metrics was right. Long
    overfitting spoils what the model has learned of halting. None trains to the end."""

    eval_limit: Positive | None = None
    """Held-out puzzles that are measured while the run trains. None means all."""

    optim: Literal["adamw", "adam_atan2"] = "adamw"
    """Optimizer of all weights but the puzzle embeddings. adam_atan2 (arXiv:2407.05872) needs no epsilon and does not
    depend on the scale of the gradient; it is the published one."""

    ema: Share | None = None
    """Decay of a moving average of the weights, which is evaluated and saved as the result; 0.999 is usual. None
    averages nothing."""

    puzzle_emb_dim: Annotated[int, Field(ge=0)] | None = None
    """Numbers that the model learns of each puzzle identifier. None means hidden_size; 0 gives it none."""

    puzzle_emb_len: Positive | None = None
    """Positions before the cells that hold the puzzle's embedding; zeros fill those that it does not need. None takes
    as many as it needs. TRM has 16, and with another number its weights give other answers."""

    puzzle_emb_lr: NotNegative = 1e-4
    """Peak rate of the puzzle embeddings, which move by its sign. 1e-2 for ARC, where each puzzle has its own."""

    puzzle_emb_weight_decay: NotNegative = 1.0
    """Weight decay of the puzzle embeddings that a step touches."""

    puzzle_emb_placement: TablePlacement = "auto"
    """Where the puzzle embeddings lie. replicated: each process has all of them. sharded: each process has those of
    every n-th identifier, n being the number of processes, and they hand each other the rows of a step; what is learned
    is the same bit for bit. auto: sharded where only that makes the run fit. `make plan` says what it saves."""

    emb_sync_every: Positive = 1000
    """Steps between two copies of replicated puzzle embeddings from the first process to the others. They compute the
    same; this is a guard."""

    compile: bool | Auto = "auto"
    """Compile the model with torch.compile: a slow start, then faster steps on a GPU. auto: true on a GPU, where a C
    compiler is installed."""

    @property
    def inner_size(self) -> int:
        """Width within SwiGLU: two thirds of `expansion` times `hidden_size`, rounded up."""
        multiple = 256 if self.hidden_size >= 512 else 32
        return math.ceil(round(self.expansion * self.hidden_size * 2 / 3) / multiple) * multiple

    @property
    def embedding_size(self) -> int:
        """Numbers that the model learns of each puzzle identifier."""
        return self.hidden_size if self.puzzle_emb_dim is None else self.puzzle_emb_dim

    @property
    def prefix_len(self) -> int:
        """Positions before the cells, which hold the puzzle's embedding."""
        return self.puzzle_emb_len or math.ceil(self.embedding_size / self.hidden_size)

    @property
    def looks_ahead(self) -> bool:
        """Whether a step runs the next segment too, to learn what going on is worth."""
        return self.q_continue and self.n_supervision > 1


SECTION = HrmConfig
