"""Is this training script right? Any PyTorch script on many ranks, compared with its own run in one process.

hook/           what each Python process of a watched command runs first
watcher.py      inside the script: what happens before, in and after each step of the optimizer
holding.py      what a rank holds of each parameter, under any wrapper
samples.py      digests of the rows that a model is given
store.py        the record of a run: JSON lines of each process, tensors by digest
runs.py         start the commands, and end them when all ranks have taken the steps
assemble.py     the pieces of all ranks, put together and held against the reference
compare.py      step by step: the first thing that differs
causes.py       why: from the shape of the difference
verdict.py      what came of it
"""

from lockstep.lazy import lazily

__all__ = ["region", "watch"]

__getattr__ = lazily(__name__, {"region": "lockstep.judge.holding", "watch": "lockstep.judge.watcher"})
