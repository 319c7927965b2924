"""Is this training script right? Any PyTorch script on many ranks, compared with its own run in one process.

hook/           what each Python process of a watched command runs first
watcher.py      inside the script: what happens before, in and after each step of the optimizer
changes.py      what a script is made to do otherwise than alone, on request
models.py       the modules that it calls; optimizers.py: what steps their parameters
holding.py      what a rank holds of each parameter (piece.py), under any wrapper (deepspeed.py: in ZeRO)
samples.py      digests of the rows that a model is given
ledger.py       the collectives before each step
store.py        the record of a run: JSON lines of each process, tensors by digest

judging.py      a judgement from end to end
runs.py         start the commands, and end them when all ranks have taken the steps
assemble.py     the pieces of all ranks, put together
compare.py      step by step: the first that differs, by inputs.py, optimizer_settings.py and what is rounding.py
causes.py       why: from the shape of the difference.py, one factor.py, the losses.py
verdict.py      what came of it; page.py: every tensor, by step
"""

from lockstep.lazy import lazily

__all__ = ["region", "watch"]

__getattr__ = lazily(__name__, {"region": "lockstep.judge.holding", "watch": "lockstep.judge.watcher"})
