"""A key/value cache: what a GPT's attention has computed of a text, so that a new token computes only its own part.

Without it every new token runs the whole text through the model again: n tokens cost n passes over up to n tokens. Keys
and values of a position depend only on what comes before it, so they can be kept, and a step is a pass over one token
that attends to what is kept. It holds for as long as positions stay what they are: a text that outgrows the model's
context is seen from its end, and then every token has moved.

Rows of a batch may have different lengths: each writes at its own next position, and sees its own past.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.gpt import GPT, Attention, first_positions


class KeyValueCache:
    """Of one model, for one batch of texts, from `open` to `close`. Under tensor parallelism a rank keeps its heads."""

    def __init__(self, model: GPT, rows: int) -> None:
        self.model, self.rows = model, rows
        self._layers: list[Attention] = [part for part in model.modules() if isinstance(part, Attention)]
        self._kept: dict[Attention, tuple[Tensor, Tensor]] = {}
        self._next = torch.zeros(0)  # of each row, the position of the token that comes in
        self._longest = 0

    def open(self) -> None:
        for part in self._layers:
            part.attend = partial(self._attend, part)

    def close(self) -> None:
        for part in self._layers:
            part.attend = part.causal_attention
        self.model.positions.use(first_positions)
        self._kept.clear()

    def at(self, positions: list[int], device: torch.device) -> None:
        """Before a pass over one token of each row: where these are."""
        self._next, self._longest = torch.tensor(positions, device=device), max(positions)
        self.model.positions.use(partial(lambda where, *_: where, self._next.unsqueeze(1)))  # a new table for each pass

    def _attend(self, part: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, tokens, head_size) each."""
        if part not in self._kept:
            room = (self.rows, k.shape[1], self.model.shape.context, k.shape[3])
            # Zeros: what a shorter text has not written yet is masked, but 0 x NaN would be NaN.
            self._kept[part] = (k.new_zeros(room), v.new_zeros(room))
            for kept, new in zip(self._kept[part], (k, v), strict=True):
                kept[:, :, : k.shape[2]] = new
            return part.causal_attention(q, k, v)
        each = torch.arange(self.rows, device=q.device)
        for kept, new in zip(self._kept[part], (k, v), strict=True):
            kept[each, :, self._next] = new[:, :, 0]
        seen = self._longest + 1
        keys, values = (kept[:, :, :seen] for kept in self._kept[part])
        past = torch.arange(seen, device=q.device) <= self._next.unsqueeze(1)  # (batch, positions)
        mask: Any = past[:, None, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
