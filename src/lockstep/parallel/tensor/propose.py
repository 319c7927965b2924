"""Proposes a plan of tensor parallelism for a model that has none: by the usual names of layers, or by pairs.

A guess, to be put into the model and checked (`lockstep verify`): it does not check that heads divide over the ranks.
"""

import re

from torch import nn

COLUMNS = {
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "qkv", "c_attn", "to_q", "to_k", "to_v", "q", "k", "v"),
    *("up", "up_proj", "gate", "gate_proj", "fc1", "fc_in", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1"),
}
ROWS = {"o_proj", "out_proj", "to_out", "o", "down", "down_proj", "fc2", "fc_out", "c_proj", "w2", "wo"}


def proposed_plan(model: nn.Module) -> dict[str, str]:
    """{pattern: kind}; nothing where no pair is found."""
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    plan: dict[str, str] = {}
    for name in linears:
        last = name.rpartition(".")[2]
        if last in COLUMNS | ROWS:
            plan[pattern(name)] = "column" if last in COLUMNS else "row"
    if not {"column", "row"} <= set(plan.values()):
        plan = {}
        for name, part in model.named_modules():
            if isinstance(part, nn.Sequential):
                plan |= pairs(name, part)
    return plan


def pairs(name: str, row: nn.Sequential) -> dict[str, str]:
    """Pairs of consecutive linear layers with only element-wise modules, without parameters, between them."""
    found: dict[str, str] = {}
    first: tuple[str, nn.Linear] | None = None
    for index, part in row.named_children():
        here = f"{name}.{index}" if name else index
        if isinstance(part, nn.Linear) and first is not None and part.in_features == first[1].out_features:
            found |= {first[0]: "column", here: "row"}
            first = None
        elif isinstance(part, nn.Linear):
            first = (here, part)
        elif any(True for _ in part.parameters()):
            first = None
    return found


def pattern(name: str) -> str:
    """With a star for the number of a block."""
    return re.sub(r"\.\d+\.", ".*.", name)


def shown_plan(plan: dict[str, str]) -> str:
    """As the method that a model would have."""
    return "def tensor_plan(self): return {" + ", ".join(f'"{name}": "{kind}"' for name, kind in plan.items()) + "}"
