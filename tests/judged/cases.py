"""Strangers' scripts, right and wrong, and what `lockstep judge` must say of each.

python -m tests.judged.cases > docs/results/judge.txt      all of them
python -m tests.judged.cases experts                        those with this word in their command
python -m tests.judged.cases on_gpu                         those that need a GPU
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from lockstep.judge.judging import Asked, Reference, against, reference_of
from lockstep.judge.verdict import Verdict

HERE = Path(__file__).parent
NEEDS = {"deepspeed": "deepspeed", "accelerate": "accelerate", "fabric": "lightning_fabric", "trainer": "accelerate"}


@dataclass(frozen=True)
class Case:
    """`reference` and `candidate`: scripts of this folder with their arguments."""

    reference: str
    candidate: str
    ranks: int = 2
    what: str | None = None
    """None: it is right; cannot: it cannot be said."""
    why: str = ""
    """A phrase of the cause."""
    names: tuple[str, ...] = ()
    """That are named; all others are not."""
    factor: float | None = None
    named_ranks: tuple[int, ...] = ()
    step: int = 1
    thread: str = ""
    """Where this fault was reported."""
    end: str = ""
    """Behind the candidate's command."""
    launcher: str = "shell"
    """shell, torchrun, or none: it starts its ranks itself."""
    sampled: bool = False
    """It is in the slow tier; all of them are run by hand."""
    no_dropout: bool = False
    same_start: bool = True
    steps: int = 3
    timeout: float = 120.0

    @property
    def name(self) -> str:
        return f"{self.candidate}{self.end} on {self.ranks}"

    @property
    def missing(self) -> str | None:
        """What it needs and is not installed."""
        needed = [NEEDS[word] for word in self.candidate.split() if word in NEEDS]
        return next((name for name in needed if not find_spec(name)), None)


def wrong(reference: str, candidate: str, what: str, why: str, *names: str, **more: object) -> Case:
    sampled = bool(more.get("thread")) or any(candidate.endswith(kind) for kind in SAMPLED)
    return Case(reference, candidate, what=what, why=why, names=names, **{"sampled": sampled, **more})  # type: ignore


SAMPLED = ("skips_bias", "stale", "boundary", "skips_step", "forgets", "buffer", "worker_moves")
"""Beside those that were reported."""
BY_HAND = "by_hand.py --batch 12"
TUTORIAL = "ddp_tutorial.py --batch 16"
EXPERTS = "experts.py --batch 12"
GPT = "nanogpt.py"
FSDP = "fsdp2.py --batch 8"
PLAIN = "frameworks.py plain --batch 16"

FAULTS = [
    wrong(BY_HAND, "by_hand.py --batch 6 --fault sum", "gradient", "summed over 2 ranks", factor=2.0),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault nothing", "gradient", "never reduced"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault skips_bias", "gradient", "never reduced", "last.bias"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault bf16", "gradient", "equal up to bf16"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault stale", "gradient", "those of step 1", step=2),
    wrong(BY_HAND, "by_hand.py --fault uneven", "gradient", "mean of means",
          thread="huggingface/transformers#34242"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault last_piece", "gradient", "element 2 of 3", "last.bias"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault boundary", "gradient", "only some elements"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault seeds", "initial weights", "ranks begin with different",
          thread="facebookresearch/detr#544"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault broadcast_half", "initial weights", "", "second.weight",
          named_ranks=(1,)),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault detached", "gradient", "no gradient at all", "first.bias",
          "first.weight", "second.bias", "second.weight"),
    wrong("by_hand.py --batch 12 --clip 0.1", "by_hand.py --batch 6 --clip 0.1 --fault clip_own", "gradient",
          "clipped by other norms", thread="pytorch/torchtitan#766", sampled=False),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault skips_step", "optimizer", "took no step", named_ranks=(1,), step=2),
    wrong("by_hand.py --batch 12 --clip 1000", "by_hand.py --batch 6 --clip 1000 --fault norm", "norm",
          "with the same gradients"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault forgets", "weights", "the gradients agree, but", step=2),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault buffer", "buffers", "the buffer mean does not", "mean"),
    wrong(BY_HAND, "by_hand.py --batch 6 --fault loss", "loss", "the loss does not"),
    wrong(BY_HAND, "by_hand.py --batch 3 --fault own_group", "gradient",
          "reduced among ranks 0, 1 and among ranks 2, 3", ranks=4),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault same_samples", "input", "seen more than once",
          launcher="torchrun", thread="PatrickHua/SimSiam#16"),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault bypassed", "gradient", "never reduced",
          thread="jingyaogong/minimind#853"),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault shuffled", "input", "not of the reference's step"),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault rate", "optimizer", "lr is 0.02 instead of 0.01"),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault decay", "optimizer", "weight_decay is 0.1 instead of 0.01"),
    wrong("ddp_tutorial.py --batch 16 --accumulate 4", "ddp_tutorial.py --batch 8 --accumulate 4 --fault undivided",
          "gradient", "summed over 4 micro-batches", factor=4.0, thread="verl-project/verl#3332"),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault times_ranks", "gradient", "summed over 2 ranks", factor=2.0),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault kept", "gradient", "step before are still in it", step=2),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault other_optimizer", "optimizer", "are not the model's"),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault early_evaluation", "initial weights", "", "0.weight",
          named_ranks=(1,)),
    wrong(TUTORIAL, "ddp_tutorial.py --batch 8 --fault worker_moves", "replicas", "between step 2 and step 3",
          "0.weight", named_ranks=(1,), step=3),
    wrong("ddp_tutorial.py --batch 16 --model batchnorm", "ddp_tutorial.py --batch 8 --model batchnorm", "gradient",
          "BatchNorm", thread="pytorch/pytorch#24391"),
    wrong(FSDP, "fsdp2.py --batch 4 --fault early_optimizer", "optimizer", "are not the model's",
          thread="huggingface/accelerate#3209"),
    wrong(FSDP, "fsdp2.py --batch 4 --fault bf16", "gradient", "equal up to bf16"),
    wrong("tensor_parallel.py", "tensor_parallel.py --own --fault no_backward_sum", "gradient",
          "was never reduced: each rank has its own, and their sum", "norm.bias", "norm.weight",
          thread="pytorch/torchtitan#1878"),
    wrong("tensor_parallel.py", "tensor_parallel.py --own --fault bias_often", "gradient",
          "the forward pass is another", thread="huggingface/text-generation-inference#1036"),
    wrong(EXPERTS, "experts.py --batch 6 --fault doubled", "gradient", "summed over 2 ranks", "experts.down",
          "experts.up", factor=2.0, thread="pytorch/pytorch#160285"),
    wrong(EXPERTS, "experts.py --batch 6 --fault below", "gradient", "all that come before experts.up",
          "embed.bias", "embed.weight", "router.weight", thread="pytorch/torchtitan#4054"),
    wrong("experts.py --batch 12 --balance 0", "experts.py --batch 6 --balance 0 --fault router_detached", "gradient",
          "router.weight has none at all", "embed.bias", "embed.weight", "router.weight",
          thread="NVIDIA-NeMo/Automodel#2995"),
    wrong(EXPERTS, "experts.py --batch 6 --fault aux_weak", "gradient", "the ranks' mean loss is",
          "embed.bias", "embed.weight", "router.weight", thread="NVIDIA/Megatron-LM#3769"),
    wrong(EXPERTS, "experts.py --batch 6 --fault aux_detached", "gradient", "", "embed.bias", "embed.weight",
          "router.weight", thread="NVIDIA-NeMo/Automodel#1408"),
    wrong(EXPERTS, "experts.py --batch 6 --fault load_of_a_rank", "gradient", "the ranks' mean loss is",
          "embed.bias", "embed.weight", "router.weight", thread="NVIDIA/Megatron-LM#5047"),
    wrong("experts.py --batch 12 --clip 0.1", "experts.py --batch 6 --clip 0.1 --fault norm", "gradient",
          "it was clipped by a norm of", thread="NVIDIA/Megatron-LM#5916"),
    wrong(GPT, "nanogpt.py --fault=never_synchronized", "gradient", "never reduced"),
    wrong(GPT, "nanogpt.py --fault=same_batches", "input", "seen more than once"),
    wrong("gan.py --batch 12", "gan.py --batch 6 --fault not_wrapped", "gradient", "never reduced"),
    *[
        wrong(PLAIN, f"frameworks.py {wrapper} --batch 8 --fault doubled", "gradient", "summed over 2", factor=2.0)
        for wrapper in ("deepspeed --stage 1", "deepspeed --stage 2", "deepspeed --stage 3", "lockstep --stage 1",
                        "lockstep --stage 2", "lockstep --stage 3", "accelerate")
    ],
]  # fmt: skip


def odd(kind: str, what: str | None, why: str = "", plain: bool = True, **more: object) -> Case:
    """Of odd.py. `plain`: its reference is the ordinary training there."""
    reference = "prints_megabytes" if plain else kind
    more = {
        "launcher": "none",
        "ranks": 1,
        "timeout": 8.0 if kind == "hangs" else 120.0,
        "sampled": plain or kind == "has_a_closure",
        **more,
    }
    return Case(f"odd.py {reference}", f"odd.py {kind} wrong", what=what, why=why, **more)  # type: ignore[arg-type]


ODD = [
    odd("prints_megabytes", None, sampled=False),
    odd("crashes", "cannot", "the disk is gone", sampled=False),
    odd("crashes", "cannot", "did not take step 3", end=" | cat"),
    odd("hangs", "cannot", "nothing new came for 8 s"),
    odd("is_another_model", "cannot", "that no rank of the candidate has", sampled=False),
    odd("wraps_its_model_itself", None),
    odd("has_a_nan", "gradient", "is not finite"),
    odd("evaluates_with_gradients", None),
    odd("has_one_optimizer_more", "cannot", "has 1 optimizer", sampled=False),
    odd("names_its_parameters", None, sampled=False),
    odd("scales_gradients_in_a_hook", None),
    odd("has_a_closure", "gradient", "2 times as large", plain=False),
    odd("draws_without_a_seed", "cannot", "give it a seed", plain=False),
    odd("drops_other_elements", "cannot", "--no-dropout", plain=False),
    odd("skips_a_step_by_its_loss_scale", None, plain=False),
    odd("forgets_rows_without_a_gradient", "weights", "the step changes weight", plain=False, step=2),
    odd("has_an_optimizer_per_layer", "optimizer", "lr is 0.2 instead of 0.1", plain=False, steps=1),
    odd("has_no_model", None, plain=False),
    odd("has_no_optimizer", "cannot", "optimizers took a step", plain=False),
]


def right(reference: str, candidate: str, ranks: int = 2, *, sampled: bool = False, **more: object) -> Case:
    return Case(reference, candidate, ranks, sampled=sampled, **more)  # type: ignore[arg-type]


def clean() -> Iterator[Case]:
    """At least 60, over all wrappers."""
    for more in ("", "--clip 0.1", "--double"):
        for ranks in (2, 3, 4):
            yield right(f"by_hand.py --batch 12 {more}", f"by_hand.py --batch {12 // ranks} {more}", ranks,
                        sampled=(ranks, more) == (3, ""))  # fmt: skip
    yield right(BY_HAND, "by_hand.py --fault uneven_right")
    for optimizer in ("adamw", "sgd", "zero"):
        for more in ("", "--accumulate 4", "--clip 0.5", "--model tied", "--model layernorm", "--bf16", "--workers 2"):
            candidate = f"ddp_tutorial.py --optimizer {optimizer}"
            plain = f"ddp_tutorial.py --optimizer {optimizer.replace('zero', 'adamw')}"
            yield right(f"{plain} --batch 16 {more}", f"{candidate} --batch 8 {more}")
    yield right("ddp_tutorial.py --batch 16 --accumulate 4", "ddp_tutorial.py --batch 8 --accumulate 4", sampled=True)
    yield right(TUTORIAL, "ddp_tutorial.py --batch 8 --optimizer zero", sampled=True)
    yield right(TUTORIAL, "ddp_tutorial.py --batch 8 --compile --workers 2")
    yield right(TUTORIAL, "ddp_tutorial.py --batch 2", 8)
    yield right(TUTORIAL, "ddp_tutorial.py --batch 8 --seed 3")
    yield right(f"{TUTORIAL} --dropout 0.2", "ddp_tutorial.py --batch 8 --dropout 0.2", no_dropout=True)
    for more in ("", "--clip 0.1", "--old flat", "--old original", "--old flat --clip 0.1"):
        plain = more.replace("--old flat", "").replace("--old original", "")
        yield right(f"{FSDP} {plain}".strip(), f"fsdp2.py --batch 4 {more}", sampled=more in ("", "--old flat"))
    yield right(FSDP, "fsdp2.py --batch 2 --ddp-mesh", 4, launcher="torchrun")
    for ranks in (2, 4):
        yield right("tensor_parallel.py", "tensor_parallel.py", ranks, sampled=ranks == 4)
        yield right("tensor_parallel.py", "tensor_parallel.py --own", ranks)
    for ranks in (2, 4):
        for more in ("", "--clip 0.1"):
            yield right(f"{EXPERTS} {more}".strip(), f"experts.py --batch {12 // ranks} {more}", ranks,
                        sampled=(ranks, more) == (2, ""))  # fmt: skip
    for more in ("", "--dtype=bfloat16", "--compile_model=1"):
        for ranks in (2, 4):
            yield right(f"{GPT} {more}".strip(), f"{GPT} {more}", ranks)
    yield right("gan.py --batch 12", "gan.py --batch 6")
    for more in ("", "--ac", "--compile --ac"):
        yield right("titan.py --batch 8", f"titan.py --batch 4 {more}")
        yield right("titan.py --batch 8", f"titan.py --batch 4 --tp 2 {more}", 4)
    yield right("titan.py --batch 8", "titan.py --batch 8 --tp 2")
    yield right("titan.py --batch 8 --unclipped", "titan.py --batch 8 --pp 2 --unclipped")
    for stage in (0, 1, 2, 3):
        for more in ("", "--accumulate 2", "--clip 0.1"):
            yield right(f"{PLAIN} {more}".strip(), f"frameworks.py deepspeed --batch 8 --stage {stage} {more}")
        ours = f"frameworks.py lockstep --batch 8 --accumulate 2 --stage {stage}"
        yield right(f"{PLAIN} --accumulate 2", ours)
    yield right(PLAIN, "frameworks.py lockstep --batch 8 --stage 3")
    for more in ("", "--accumulate 2", "--clip 0.1"):
        yield right(f"{PLAIN} {more}".strip(), f"frameworks.py accelerate --batch 8 {more}")
    for more in ("", "--clip 0.1"):
        yield right(f"{PLAIN} {more}".strip(), f"DEVICES=2 frameworks.py fabric --batch 8 {more}", launcher="none")
    yield right("frameworks.py trainer --batch 16", "frameworks.py trainer --batch 8")


CLEAN = list(clean())


CLIPPED = ("ddp", "fsdp")
"""By torch's clip_grad_norm_, which takes no pieces, nor plain tensors and DTensors at once."""


def on_gpu() -> Iterator[Case]:
    """Two ranks of one GPU, over NCCL."""
    for more in ("", "--bf16", "--accumulate 2", "--clip 0.1"):
        for wrapper in ("ddp", "fsdp", "tp", "zero3"):
            if more != "--clip 0.1" or wrapper in CLIPPED:
                yield right(
                    f"on_gpu.py plain {more}".strip(), f"on_gpu.py {wrapper} {more}".strip(), launcher="torchrun"
                )
    yield right("on_gpu.py plain", "on_gpu.py ddp", 4, launcher="torchrun")
    yield right("on_gpu.py plain", "on_gpu.py ddp --compile", launcher="torchrun")
    for fault, what, why in (
        ("summed", "gradient", "summed over 2 ranks"),
        ("bypassed", "gradient", "never reduced"),
        ("same_samples", "input", "seen more than once"),
    ):
        yield wrong("on_gpu.py plain", f"on_gpu.py ddp --fault {fault}", what, why, launcher="torchrun")
    yield wrong("on_gpu.py plain --accumulate 2", "on_gpu.py fsdp --accumulate 2 --fault undivided", "gradient",
                "summed instead of averaged", launcher="torchrun")  # fmt: skip


ON_GPU = list(on_gpu())


PYTHON = sys.executable
"""Tests set another one, which starts sooner."""


def reference_command(case: Case) -> str:
    script, *arguments = case.reference.split()
    return " ".join([PYTHON, str(HERE / script), *arguments])


@contextmanager
def candidate_command(case: Case) -> Iterator[str]:
    words = case.candidate.split()
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    script = " ".join([str(HERE / words[at]), *words[at + 1 :]])
    if case.launcher == "torchrun":
        start = f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node {case.ranks} {script}"
    elif case.launcher == "none":
        start = " ".join([*words[:at], PYTHON, script]) + case.end
    else:
        common = f"WORLD_SIZE={case.ranks} MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} OMP_NUM_THREADS=1"
        one = f"RANK=$rank LOCAL_RANK=$rank {common} {PYTHON} {script}"
        start = f"for rank in {' '.join(map(str, range(case.ranks)))}; do {one} & done; wait"
    yield start


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def asked(case: Case, candidate: str = "") -> Asked:
    return Asked(
        reference_command(case),
        candidate,
        case.steps,
        case.same_start,
        case.no_dropout,
        timeout=case.timeout,
        share_gpu="on_gpu.py" in case.candidate,
    )


def judged(case: Case, reference: Reference) -> Verdict:
    with candidate_command(case) as command:
        return against(reference, asked(case, command))


def problem(case: Case, found: Verdict) -> str | None:
    """What is not as it must be."""
    said = f"{found.verdict} {found.what} at step {found.step}: {found.names} on {found.ranks}: {found.why}"
    if case.what is None:
        return None if found.verdict == "equal" else f"not equal, but {said}"
    if case.what == "cannot":
        return None if found.verdict == "cannot" and case.why in found.why else said
    right = (
        found.verdict == "differs"
        and found.what == case.what
        and found.step == case.step
        and case.why in found.why
        and (not case.names or set(found.names) == set(case.names))
        and (case.factor is None or (found.factor is not None and abs(found.factor - case.factor) < 0.01))
        and (not case.named_ranks or tuple(found.ranks) == case.named_ranks)
    )
    return None if right else said


@dataclass
class Line:
    """Of the table."""

    case: Case
    found: Verdict
    problem: str | None
    seconds: float = field(default=0.0)


def run_all(cases: list[Case]) -> Iterator[Line]:
    """Those of one reference after the other."""
    by_reference: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        by_reference.setdefault((case.reference, case.steps, case.no_dropout), []).append(case)
    for group in by_reference.values():
        with reference_of(asked(group[0])) as reference:
            for case in group:
                begun = time.monotonic()
                found = judged(case, reference)
                yield Line(case, found, problem(case, found), time.monotonic() - begun)


def main(words: list[str]) -> int:
    os.environ.setdefault("OUTPUT", "/tmp/judged")
    kinds = {"FAULTS": FAULTS, "RIGHT ONES": CLEAN, "ODD ONES": ODD}
    if words[:1] == ["on_gpu"]:
        kinds = {"TWO RANKS AND MORE OF ONE GPU, OVER NCCL": ON_GPU}
    bad, count = 0, 0
    for kind, every in kinds.items():
        chosen = [case for case in every if all(word in case.name for word in words)]
        count += len(chosen)
        if chosen:
            print(f"\n{kind}\n")
        for line in run_all([case for case in chosen if case.missing is None]):
            bad += line.problem is not None
            mark = "ok " if line.problem is None else "BAD"
            said = line.problem or f"{line.found.what or line.found.verdict}: {line.found.why}".partition("\n")[0]
            print(f"{mark} {line.case.name:<72} {line.case.thread:<28} {line.seconds:5.1f} s  {said}", flush=True)
        left = [case.name for case in chosen if case.missing is not None]
        if left:
            print(f"left out, as what they need is not installed: {', '.join(left)}")
    print(f"\n{count} judged, {bad} not as they must be")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
