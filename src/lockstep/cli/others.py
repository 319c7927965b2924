"""Words of other tools, and ours: for a flag that is not known, and for the page "Coming from ...". No torch here."""

from collections.abc import Iterable
from difflib import get_close_matches

from lockstep.errors import UserError

OTHERS: dict[str, dict[str, str]] = {
    "plain PyTorch scripts": {
        "DistributedSampler": "nothing: ranks read shares of one shuffled order (`lockstep.shard_batch` in a loop)",
        "DistributedDataParallel(model)": "`lockstep.DataParallel(model)`, or DDP itself; `--parallel.data ddp`",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "`lockstep.clip_grad_norm_(model, 1.0)`",
        "--batch-size": "--train.batch-size, of all ranks together; of each rank: --train.batch-per-rank",
        "--lr": "--train.lr",
        "--learning-rate": "--train.lr",
        "--epochs": "--train.epochs",
        "--steps": "--train.steps",
        "--seed": "--train.seed",
        "--optimizer": "--train.optimizer",
        "--weight-decay": "--train.weight-decay",
        "--momentum": "--train.momentum",
        "--precision": "--train.precision",
        "--amp": "--train.precision bf16",
        "--bf16": "--train.precision bf16",
        "--fp16": "--train.precision fp16",
        "--compile": "--train.compile blocks",
        "--accumulation": "--train.accumulation",
        "--grad-clip": "--train.clip-norm",
        "--workers": "--data.workers",
        "--num-workers": "--data.workers",
        "--dataset": "--data.name",
        "--data-dir": "--data.path",
        "--data": "--data.name, or --data.import for your own",
        "--synthetic": "--data.name synthetic",
        "--world-size": "--nproc",
        "--nproc-per-node": "--nproc",
        "--num-gpus": "--nproc",
        "--gpus": "--nproc",
        "--local-rank": "nothing: torchrun and srun say it in the environment",
        "--output-dir": "--run-dir",
        "--out-dir": "--run-dir",
        "--save-every": "--checkpoint.every",
        "--checkpoint": "--checkpoint.every N, and --resume RUN",
    },
    "scripts that compare DDP and FSDP": {
        "--ddp": "--parallel.data ddp",
        "--fsdp": "--parallel.data fsdp",
        "--strategy": "--parallel.data (train), --strategies (verify, bench)",
        "--channels": "--model.channels",
        "--model-size": "--model.size",
        "--hidden-size": "--model.d-model of a gpt, --model.width of an mlp",
        "--num-layers": "--model.layers",
        "--sharding-strategy": "--parallel.sharding",
        "--sweep": "lockstep bench train --preset cnn-sizes",
        "--bucket-cap-mb": "--parallel.bucket-mb",
        "--profile": "lockstep profile",
        "--benchmark": "lockstep bench train",
        "--verify": "lockstep verify",
    },
    "nanoGPT": {
        "--batch_size": "--train.batch-size, of all ranks together",
        "--block_size": "--model.context",
        "--n_layer": "--model.layers",
        "--n_head": "--model.heads",
        "--n_embd": "--model.d-model",
        "--dropout": "--model.dropout",
        "--max_iters": "--train.steps",
        "--learning_rate": "--train.lr",
        "--gradient_accumulation_steps": "--train.accumulation",
        "--eval_interval": "--train.evaluate-steps",
        "--eval_iters": "--train.evaluate-batches",
        "--warmup_iters": "--train.warmup-steps",
        "--init_from": "--train.weights, or lockstep import",
        "--dtype": "--train.precision",
    },
    "Hugging Face Accelerate and Trainer": {
        "--num_processes": "--nproc",
        "--mixed_precision": "--train.precision",
        "--per_device_train_batch_size": "--train.batch-per-rank",
        "--max_steps": "--train.steps",
        "--num_train_epochs": "--train.epochs",
        "--max_grad_norm": "--train.clip-norm",
        "--save_steps": "--checkpoint.every",
        "--eval_steps": "--train.evaluate-steps",
        "--gradient_checkpointing": "--train.recompute full",
        "--deepspeed_config_file": "--parallel.deepspeed-config",
        "accelerator.prepare(model)": "a wrapper: `lockstep.DataParallel(model)`, `FullyShardedDataParallel(model)`",
        "accelerator.clip_grad_norm_": "`lockstep.clip_grad_norm_(model, 1.0)`",
        "accelerator.save_state": "`lockstep.save(folder, model, optimizer, step)`",
    },
    "Lightning": {
        "--devices": "--nproc",
        "--accelerator": "--device",
        "--accumulate_grad_batches": "--train.accumulation",
        "--gradient_clip_val": "--train.clip-norm",
        "--max_epochs": "--train.epochs",
        "--log_every_n_steps": "--train.log-every",
        "--val_check_interval": "--train.evaluate-steps",
        "--num_nodes": "torchrun or srun, or lockstep launch --nodes",
    },
    "torchtitan": {
        "--data_parallel_shard_degree": "--parallel.data fsdp, --parallel.shard N",
        "--data_parallel_replicate_degree": "--parallel.replicate",
        "--tensor_parallel_degree": "--parallel.tp",
        "--pipeline_parallel_degree": "--parallel.pp",
        "--context_parallel_degree": "--parallel.cp",
        "--pipeline_parallel_schedule": "--parallel.schedule",
        "--local_batch_size": "--train.batch-per-rank",
        "--seq_len": "--model.context",
        "--activation_checkpoint": "--train.recompute",
        "--job.config_file": "the config comes first: lockstep train CONFIG.yaml",
    },
}


def refuse_unless_known(flag: str, known: Iterable[str], command: str) -> None:
    """A flag without a dot. `known`: names, with - between words."""
    name = flag.removeprefix("--").replace("_", "-")
    if name in known or name.removeprefix("no-") in known:
        return
    ours, alike = ours_for(flag), get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; here it is {ours}" if ours else f"; did you mean --{alike[0]}?" if alike else ""
    raise UserError(f"unknown flag {flag}{hint}; see lockstep {command} --help")


def ours_for(flag: str) -> str | None:
    """What we call a flag of another tool."""
    name = flag.replace("_", "-")
    for words in OTHERS.values():
        for theirs, ours in words.items():
            if theirs.replace("_", "-") == name:
                return ours
    return None


def tables() -> str:
    """For the page: one table for each tool."""
    parts = []
    for tool, words in OTHERS.items():
        rows = [f"| `{theirs}` | {_marked(ours)} |" for theirs, ours in words.items()]
        parts.append("\n".join([f"## {tool[0].upper()}{tool[1:]}", "", "| theirs | ours |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def _marked(ours: str) -> str:
    """Flags and commands as code, where they are not marked already."""
    if "`" in ours:
        return ours
    words = [f"`{word}`" if word.startswith("--") else word for word in ours.replace(",", " ,").split()]
    return " ".join(words).replace(" ,", ",")
