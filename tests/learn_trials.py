"""Exercises that learners and breakers have written: wrong, and once passed or called by another mistake's name.

Each is a lesson's solution with some of its lines replaced, and what the check must say of it; None: it is right, only
written in another way.
"""

from lockstep.learn.lesson import lesson_named

Change = tuple[str, str]
TRIALS: dict[str, dict[str, tuple[list[Change], str | None]]] = {
    "data_wall": {
        "no relu": ([("modules.append(nn.ReLU())", "pass")], "build_model: expected Linear, ReLU, Linear"),
        "no bias": ([("nn.Linear(width, width)", "nn.Linear(width, width, bias=False)")], "has no bias"),
        "tensor losses": ([("loss.item()", "loss.detach()")], "expected a list of numbers"),
        "seconds_for None": ([("return seconds * samples / done", "pass")], "expected 10.5, got None"),
        "sum": ([(".mean()", ".sum()")], "the loss is a sum, not a mean"),
    },
    "two_copies": {
        "whole batch each": ([("model(x) - y", "model(inputs) - targets")], "the copies computed"),
        "not divided": ([("total / sum(counts)).clone()", "total).clone()")], "not divided by all samples"),
        "zero_grad forgotten": ([("optimizer.zero_grad()", "pass")], "were not cleared"),
    },
    "primitives": {
        "into a copy": (
            [("dist.broadcast(parameter.data, src=0)", "dist.broadcast(parameter.data.clone(), src=0)")],
            "not into this rank's parameters",
        ),
        "sleeps": ([("dist.barrier()", "__import__('time').sleep(2)")], "nothing was waited for"),
        "one place": (
            [
                (
                    "[torch.empty_like(value) for _ in range(dist.get_world_size())]\n    dist.all_gather",
                    "[torch.empty_like(value)] * dist.get_world_size()\n    dist.all_gather",
                )
            ],
            "one and the same tensor",
        ),
        "complex": ([("torch.stack(places)", "torch.stack(places) + 5j")], "expected float64, got complex128"),
    },
    "all_reduce": {
        "tree is a chain": (
            [
                (
                    "def ring(",
                    """def tree(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    place = torch.empty_like(tensor)
    if rank < size - 1:
        dist.recv(place, rank + 1)
        tensor += place
    if rank > 0:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
    if rank < size - 1:
        dist.send(tensor, rank + 1)


def ring(""",
                )
            ],
            "wait for one another",
        ),
        "naive is a tree": ([("def ring(", "naive = tree\n\n\ndef ring(")], "naive: a message to or from rank"),
        "ring is torch's": ([("def ring_seconds(", "ring = dist.all_reduce\n\n\ndef ring_seconds(")], "by hand"),
        "stranger": (
            [
                (
                    "if rank % (2 * distance) == distance:\n            dist.send(tensor, rank - distance)",
                    "if rank % (2 * distance) == distance:\n            dist.send(tensor, rank + 4)",
                )
            ],
            "but there are ranks 0 to",
        ),
        "NaN": ([("return 2 * (ranks - 1) * (", "return float('nan') * (")], "ring_seconds(4, 1e+06, 1e-05, 1e+09)"),
    },
    "naive_dp": {
        "never waits": (
            [("dist.all_reduce(tensor)", "dist.all_reduce(tensor, async_op=tensor.dim() > 0)")],
            "was never waited for",
        ),
        "endless seconds": ([('"comm_seconds": seconds', '"comm_seconds": 1e6')], "comm_seconds: 1000000"),
    },
    "hooks": {
        "all at the end": (
            [
                (
                    "self.pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
                    "self.late = [*getattr(self, 'late', []), parameter]\n"
                    "        if len(self.late) == len(list(self.model.parameters())):\n"
                    "            self.pending = [(p, dist.all_reduce(p.grad, async_op=True)) for p in self.late]\n"
                    "            self.late = []",
                )
            ],
            "all began when the last gradient had come",
        ),
        "no hook": ([("parameter.register_post_accumulate_grad_hook(self.ready)", "pass")], "no all-reduce was made"),
    },
    "ddp": {
        "starts in finish": ([("            self.launch()\n\n", "\n")], "nothing was in flight while backward ran"),
        "forward order": ([("trainable[::-1]", "trainable")], "all began when the last gradient had come"),
        "no finally": (
            [
                (
                    "        try:\n            yield\n        finally:\n            self.synchronizes = True",
                    "        yield\n        self.synchronizes = True",
                )
            ],
            "after an error inside of no_sync",
        ),
        "sum": ([("reduced.grad /= self.size", "pass")], "you summed, the mean is missing"),
    },
    "buckets": {
        "once": ([("median(seconds(cap) for _ in range(tries))", "seconds(cap)")], "the caps were tried [1, 1, 1]"),
        "always five": ([("range(tries)", "range(5)")], "with 3 tries: the caps were tried [5, 5, 5]"),
        "new tensors": (
            [
                (
                    "gradients[index].copy_(piece.view_as(gradients[index]))",
                    "gradients[index] = piece.view_as(gradients[index])",
                )
            ],
            "you put new tensors into the list",
        ),
        "cap exclusive": ([("> cap", ">= cap")], "exactly as large as the cap"),
        "never waits": ([("        work.wait()\n", "")], "was never waited for"),
    },
    "performance": {
        "NaN": ([("return total\n", "return float('nan')\n")], "got nan"),
        "data of rank 0": (
            [
                (
                    'for phases in profile:\n        if phases["data"]',
                    'for phases in profile[:1]:\n        if phases["data"]',
                )
            ],
            "expected 'data'",
        ),
        "share of computing": (
            [
                (
                    'phases["data"] > 0.2 * sum(phases.values())',
                    'phases["data"] > 0.2 * (phases["forward"] + phases["backward"])',
                )
            ],
            "expected 'none', got 'data'",
        ),
        "a fifth slower": ([("1.25 * median", "1.2 * median")], "expected 'none', got 'rank 1'"),
    },
    "less_traffic": {
        "fp16": ([("torch.bfloat16", "torch.float16")], "float16 ends at 65,504"),
        "broadcasts": (
            [
                (
                    "dist.all_reduce(parameter.data)\n        parameter.data /= dist.get_world_size()",
                    "dist.broadcast(parameter.data, 0)",
                )
            ],
            "average_weights: the weight",
        ),
        "not by size": ([("full.abs().topk", "full.topk")], "a large negative number counts too"),
        "momentum is lost": (
            [("momentum.mul_(beta).add_(gradient)", "momentum = beta * momentum + gradient")],
            "change it in place",
        ),
    },
    "zero12": {
        "rounds down": ([("-(-total // self.size)", "total // self.size")], "belong to no rank: round the piece up"),
        "keeps all": (
            [("flat = torch.empty_like(gradient)\n", "flat = self.all = torch.empty_like(gradient)\n")],
            "besides the parameters",
        ),
    },
    "zero3": {
        "keeps it in ctx": (
            [("ctx.save_for_backward(x, shard)", "ctx.save_for_backward(x, shard)\n        ctx.w = weight")],
            "a whole weight is kept for backward",
        ),
        "waits at once": (
            [
                (
                    "handle = start_gather(shards[index + 1].detach())",
                    "handle = start_gather(shards[index + 1].detach())\n            finish_gather(handle)",
                )
            ],
            "waited for at once",
        ),
        "keeps all": (
            [
                (
                    "weight = finish_gather(handle)\n",
                    "weight = finish_gather(handle)\n        kept = [*(kept if index else []), weight]\n",
                )
            ],
            "layers gathered at once",
        ),
    },
    "tensor_parallel": {
        "the table travels": (
            [
                (
                    "return SumOfRanks.apply(found)",
                    "parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]\n"
                    "    dist.all_gather(parts, rows.detach())\n    parts[dist.get_rank()] = rows\n"
                    "    return torch.cat(parts)[tokens]",
                )
            ],
            "embedding: the table travelled",
        ),
        "sums twice": (
            [("return gradients[0]\n\n\ndef mlp(", "return summed(gradients[0])\n\n\ndef mlp(")],
            "summed twice",
        ),
        "clamps": (
            [
                (
                    "rows[torch.where(mine, tokens - begin, 0)] * mine.unsqueeze(-1)",
                    "rows[(tokens - begin).clamp(0, len(rows) - 1)]",
                )
            ],
            "to the edge of this rank's rows",
        ),
    },
    "pipelines": {
        "ignores its order": (
            [
                (
                    "for kind, number in order:",
                    "for kind, number in [(k, i) for i in range(len(order) // 2) for k in 'FB']:",
                )
            ],
            "its instructions are",
        ),
        "keeps all": ([("held.pop(number)", "held[number]")], "release each after its backward"),
    },
    "ring_attention": {
        "lse of the larger": (
            [
                (
                    "lse = torch.logaddexp(one[1], other[1])\n    parts",
                    "lse = torch.logaddexp(one[1], other[1])\n    top = torch.maximum(one[1], other[1])\n    parts",
                ),
                ("return parts[0] + parts[1], lse", "return parts[0] + parts[1], top"),
            ],
            "merge of two blocks: lse",
        ),
        "wrong owner": ([("(rank - turn) % size", "(rank + turn) % size")], "whose block is it?"),
        "skips later blocks": (
            [("        result = merge(", "        if source > rank:\n            continue\n        result = merge(")],
            None,
        ),
    },
    "three_d": {
        "half of the GPUs": ([('"dp=4,tp=2,pp=2,zero=1"', '"dp=8,zero=3"')], "and there are 16 GPUs"),
    },
    "things_break": {
        "no pair": ([('"a": (UNEVEN, 1)', '"a": UNEVEN')], "must be a pair"),
        "unknown": ([('"a": (UNEVEN, 1)', '"a": ("uneven", 1)')], "is none of the five causes"),
        "a word": ([('"a": (UNEVEN, 1)', '"a": (UNEVEN, "1")')], None),
    },
}


def written(lesson: str, name: str) -> str:
    """The exercise."""
    text = lesson_named(lesson).solution
    for old, new in TRIALS[lesson][name][0]:
        assert old in text, f"{lesson}, {name}: {old!r} is not in the solution any more"
        text = text.replace(old, new)
    return text
