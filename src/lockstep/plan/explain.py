"""Every term of a prediction in words: its formula, its number, where the formula comes from."""

from lockstep.plan.memory import GIB
from lockstep.plan.search import ScoredLayout
from lockstep.words import duration

TIME = {
    "products": ("3 x sum of 2mkn / (peak x efficiency of the shape), of a stage's layers", "plan/kernels.py"),
    "attention": ("causal FLOP, forward and 2.5 x for backward, at the rate of its kernel", "plan/kernels.py"),
    "moving": ("bytes that norms, activations and residuals read and write, over the memory's rate", "plan/step.py"),
    "head": ("3 x products with the vocabulary, and passes over fp32 logits", "plan/step.py"),
    "recompute": ("forward again, as much of it as the layout asks for", "plan/layout.py"),
    "tensor": (
        "2 x 2(t-1)/t tokens x hidden bytes a layer and direction (sequence: 2 x 3 back), over the group's links",
        "parallel/tensor/law.py",
    ),
    "context": (
        "(c-1) messages of keys and values a layer, beyond what attention hides",
        "parallel/context/law.py",
    ),
    "experts": ("two all-to-alls of tokens x visits a layer and direction, and their permutation", "plan/links.py"),
    "shards": ("(n-1)/n parameters gathered twice and reduced once, beyond what layers hide", "parallel/zero/law.py"),
    "launch": ("the host's time to issue a layer's kernels, where it exceeds the GPU's", "plan/step.py"),
    "pipeline": (
        "the schedule, run with these stages: what the busiest rank stands idle",
        "parallel/pipeline",
    ),
    "gradients": ("2(n-1)/n gradients (and parameters back), beyond what backward hides", "parallel/data/law.py"),
    "optimizer": ("28 bytes per parameter of the rank's share, over the memory's rate", "plan/step.py"),
    "straggling": ("what the slowest of so many ranks costs", "plan/constants.yaml"),
}
MEMORY = {
    "parameters": "bytes of a parameter x those of the stage / (tp, and shards with zero3)",
    "gradients": "bytes of a gradient x the same / (shards from zero2 on)",
    "optimizer": "moments and master weights x the same / (shards from zero1 on)",
    "activations": "what a layer keeps of a token x tokens x layers x micro-batches in flight",
    "logits": "tokens x vocabulary / tp x bytes held for a logit",
    "buffers": "gathered layers (zero3), gradients that are being sent",
    "overhead": "context, communication buffers, fragmentation",
}


def explained(plan: ScoredLayout) -> list[tuple[str, str, str, str]]:
    """(term, number, formula, where it stands); times, then memory."""
    found = []
    for name, seconds in plan.time.terms.items():
        formula, where = TIME[name]
        found.append((name, f"{duration(seconds)} ({seconds / plan.time.seconds:.1%})", formula, where))
    for name, size in plan.memory.kinds.items():
        found.append((name, f"{size / GIB:.2f} GiB", MEMORY[name], "plan/memory.py"))
    return found


def warnings(plan: ScoredLayout) -> list[str]:
    """Sizes that waste tiles, and settings that only just fit."""
    network, layout, said = plan.setting.network, plan.layout, []
    for block, _ in network.layers[:1]:
        odd = [p for p in block.products if p.cut != "whole" and (p.k % 64 or (p.n // layout.tp) % 64)]
        if odd:
            said.append(
                f"a product of {odd[0].k} x {odd[0].n} / {layout.tp} is no multiple of 64 in a size: its tiles are not "
                f"full"
            )
        if block.attention is not None and block.attention.dim % 8:
            said.append(f"heads of {block.attention.dim} are no multiple of 8: attention falls off the tensor cores")
    if network.vocabulary and (network.vocabulary % 64 or (network.vocabulary // layout.tp) % 64):
        said.append(f"a vocabulary of {network.vocabulary:,} is no multiple of 64 x tp: pad it")
    if plan.fits == "risky":
        said.append("the best one needs more than 80% of what is free: small differences may make it run out of memory")
    return said
