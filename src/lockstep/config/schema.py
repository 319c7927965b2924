"""What can be asked for: nested dataclasses, one per section of a config file."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from lockstep.config.limits import Amount, Args, Count, Decay, Degree, Import, Natural, Rate, Share, Width
from lockstep.config.models import CNN, Model

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]


@dataclass
class Data:
    """What the model learns from."""

    name: Literal["synthetic", "digits", "mnist", "cifar10", "text", "tokens", "imagefolder", "own"] = "digits"
    kind: Literal["images", "tokens", "regression"] | None = None
    """Kind of synthetic data. None: what the model reads."""
    path: str | None = None
    """Folder of mnist and cifar10 (None: datasets); for text, the file or folder to read (None: Python's sources);
    for tokens, what lockstep tokenize made; for imagefolder, a folder with train/CLASS/*.png and test/CLASS/*.png."""
    download: bool = True
    """Fetch mnist or cifar10 when its files are not there."""
    samples: Count = 4096
    """Size of a synthetic training set."""
    shape: tuple[Width, ...] = (3, 32, 32)
    """Shape of one synthetic image, and what imagefolder resizes to; for regression, the number of features."""
    classes: Width = 10
    """Classes of synthetic images; for regression, the number of outputs."""
    augment: tuple[Literal["crop", "flip"], ...] = ()
    """Of images: a part of each, padded by 4 pixels, as large as it was; every second one mirrored. What becomes of a
    sample is decided by the seed, the epoch and its number."""
    max_bytes: Count = 8_000_000
    """How much text to read at most."""
    import_: Import = None
    """Data of your own: package.module:function, which returns a training and a test set."""
    args: Args = field(default_factory=dict)
    """What it is called with: --data.args.folder images."""
    workers: Annotated[int, Interval(ge=0, le=1024)] = 0
    """Processes of each rank that read a Dataset ahead. 0: the rank itself, when it needs a batch."""

    def __post_init__(self) -> None:
        if self.import_ is not None:
            self.name = "own"


@dataclass
class Train:
    """The optimizer's side of training."""

    epochs: Count = 10
    steps: Count | None = None
    """Take this many steps, whatever `epochs` says."""
    batch_size: Count = 128
    """The GLOBAL batch: samples of one optimizer step, over all ranks and micro-batches."""
    batch_per_rank: Count | None = None
    """Instead of batch_size: samples of one micro-batch on one rank. The global batch is this times `accumulation`
    times the ranks that read different samples."""
    accumulation: Count = 1
    """Micro-batches of one step; gradients are synchronized once, at the last one."""
    loss: str | None = None
    """Of your own: package.module:function, (outputs, targets) -> their mean. None: cross entropy, or the mean squared
    error where targets are floating-point numbers."""
    z_loss: Amount = 0.0
    """With cross entropy: the weight of the mean square of the logits' logsumexp, which keeps them small (usually
    1e-4). It is in the gradients only; losses that are shown are cross entropies."""
    optimizer: str = "sgd"
    """sgd, adam, adamw, adamw_8bit and adamw_bf16 (AdamW whose two moments take 2 and 4 bytes of each weight instead of
    8), muon (for the matrices of the blocks, adamw for the rest), schedule_free (AdamW that averages its weights), or
    one of your own: package.module:class, as torch.optim:RMSprop."""
    lr: Rate = 0.1
    momentum: Share = 0.9
    """Of sgd."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Of adam, adamw in all its forms and schedule_free, and of what muon does not step itself."""
    muon_momentum: Share = 0.95
    weight_decay: Rate = 0.0
    schedule: str = "cosine"
    """constant, cosine, step, or one of your own: package.module:function, (step, steps) -> a factor of the rate."""
    warmup_steps: Natural = 0
    lr_decay: Rate = 0.1
    """The factor of the `step` schedule at each of `lr_milestones`, and the floor of `cosine`."""
    lr_milestones: tuple[Share, ...] = (0.5, 0.75)
    """Where `step` lowers the rate, as fractions of the run."""
    clip_norm: Annotated[float, Interval(ge=1e-12, le=1e9)] | None = None
    """Clip gradients to this global norm."""
    clip_value: Annotated[float, Interval(ge=1e-12, le=1e9)] | None = None
    """Clip each element of a gradient to this size, instead."""
    ema: Decay | None = None
    """Evaluate and export an exponential moving average of the weights with this decay (0.999), which training itself
    does not use. None: the weights of the last step."""
    precision: Literal["fp32", "fp64", "bf16", "fp16", "fp8"] = "fp32"
    """bf16 and fp16 are autocast over fp32 weights; fp16 scales the loss. fp8: as bf16, and the linear layers of the
    blocks multiply in FP8 (`fp8.scaling`)."""
    compile: Literal["none", "blocks", "model"] = "none"
    """torch.compile of the loss and of each block by itself (once for all that are alike; gradients still leave block
    by block), or of the whole model as one (for one rank; zero3 and fsdp take blocks in any case)."""
    recompute: Literal["none", "full", "every", "attention"] = "none"
    """Activation checkpointing: every block, each `recompute_every`-th block, or attention only."""
    recompute_every: Count = 2
    weights: str | None = None
    """Start from these weights, a safetensors file. None: random ones, by the seed."""
    seed: Natural = 0
    """The same seed gives the same run: bit by bit on the CPU, up to the order of atomic additions on a GPU."""
    evaluate_every: Natural = 1
    """Epochs between evaluations on the test set; 0: only at the end."""
    evaluate_steps: Count | None = None
    """Steps between evaluations, instead of epochs."""
    evaluate_batches: Count | None = None
    """Batches of an evaluation, at most. None: the whole test set."""
    patience: Count | None = None
    """Stop after this many evaluations in a row without a new lowest test loss. None: never."""
    straggler: Amount = 1.5
    """Name a rank whose own work takes this many times as long as its peers', in 8 of 10 steps, twice. 0: none."""
    check_replicas: Natural = 0
    """Steps between comparisons of the weights that ranks should share, bit by bit, which find silent corruption. 0:
    never."""
    log_every: Count = 10
    """Steps between lines of metrics, each of which covers the steps since the last."""
    callbacks: tuple[str, ...] = ()
    """Functions of your own, package.module:function, that rank 0 calls with (kind, step, values) at every record:
    train, test, checkpoint, skipped."""


@dataclass
class Parallel:
    """How one step is spread over the ranks."""

    data: str = "bucketed"
    """The strategy: single, naive, flat, overlap, bucketed, ddp, zero1, zero2, zero3, fsdp, zero1_torch, deepspeed
    or local_sgd."""
    bucket_mb: Amount = 25.0
    """Bucket size of bucketed, ddp, zero1 and zero2, MiB."""
    compression: Literal["none", "bf16", "fp16", "int8", "1bit", "topk", "powersgd", "demo"] = "none"
    """Gradient compression of naive, flat, overlap and bucketed. demo steps by signs: for sgd without momentum, and
    rates of 1e-3 and below."""
    algorithm: str = "native"
    """All-reduce of naive, flat, overlap and bucketed: native (the backend's own), naive, tree, ring,
    recursive_doubling, halving_doubling, double_tree, hierarchical, or auto (the fastest by the cost model)."""
    sharding: Sharding = "FULL_SHARD"
    """Of fsdp; zero3 knows the first two. SHARD_GRAD_OP keeps parameters whole from forward to backward."""
    replicate: Degree | None = None
    """Copies of the parameters. -1: the rest of the ranks. None: all ranks under naive to ddp, one copy under zero1 to
    fsdp, and what HYBRID_SHARD needs."""
    shard: Degree | None = None
    """Ranks that hold one copy together. -1: the rest. None: under zero1 to fsdp all, or what replicate leaves."""
    shard_size: Count | None = None
    """Ranks that hold one copy together under HYBRID_SHARD. None: those of a machine; on one machine, half of them."""
    pp: Count = 1
    """Pipeline stages: ranks that have other layers, and read the same samples."""
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    """Of a pipeline: in which order its stages work on the micro-batches (`lockstep schedule` draws them)."""
    micro_batches: Count | None = None
    """Of a pipeline, per step. None: train.accumulation, or twice the stages if that is 1."""
    chunks: Count = 1
    """Parts of the model per stage, of interleaved; the others have one, zb-v always two."""
    recompute_stages: tuple[int, ...] = ()
    """Of a pipeline: the stages that train.recompute is for; the first hold the most micro-batches. Empty: all."""
    cp: Count = 1
    """Context parallel: ranks that have other positions of the same sequences."""
    attention: Literal["ring", "ulysses"] = "ring"
    """With cp: keys and values go round the ranks, or ranks exchange positions for heads."""
    tp: Count = 1
    """Tensor parallel: ranks that have other rows or columns of the same matrices, and read the same samples."""
    ep: Count = 1
    """Expert parallel: ranks that hold other experts. They are ranks that hold copies of the rest of the model
    (replicate, shard, cp), and with tp also those of tp: the product of the degrees stays the number of ranks."""
    cut_experts: bool = False
    """With tp and ep: each expert is cut along its width over the tp ranks too, instead of being whole on one rank.
    With tp alone it always is."""
    expert_halves: bool = False
    """With ep: tokens go to their experts in two halves, of which one travels while the other is computed."""
    sequence: bool = False
    """With tp: what lies between the matrices is cut too, along its positions (sequence parallel)."""
    keep_gathered: bool = False
    """With sequence: keep the gathered inputs of cut layers for backward, which else gathers them again: less traffic
    for more memory."""
    native: tuple[Literal["tp", "pp", "cp", "ep"], ...] = ()
    """Axes that PyTorch's own means cut instead of ours: DTensor (tp; with all_to_all_single, ep),
    torch.distributed.pipelining (pp), its ring attention (cp, on GPUs)."""
    reduce_dtype: Literal["fp32", "compute"] = "fp32"
    """What zero3 and fsdp reduce gradients in, where they compute in bf16 or fp16."""
    reshard_micro_batches: bool = False
    """In a pipeline, of fsdp: release parameters and reduce gradients in every micro-batch, instead of once per step:
    less memory for more traffic."""
    prefetch: Natural = 1
    """Units that zero3 gathers ahead."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where sharded optimizer state (and, under zero3, fsdp and deepspeed stage 3, parameters) lies between uses."""
    nvme_path: str = "nvme"
    """Folder on the drive that offload nvme uses."""
    zero_stage: Literal[1, 2, 3] = 3
    """Of deepspeed."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON file for deepspeed, instead of zero_stage and offload; `auto` stands for what we say here."""
    topk_ratio: Annotated[float, Interval(ge=1e-9, le=1)] = 0.01
    """Share of the gradient's elements that topk sends, and of its frequencies that demo sends."""
    powersgd_rank: Width = 4
    """Rank of the approximation of powersgd."""
    sync_every: Count = 8
    """Steps between two parameter averages of local_sgd."""
    outer_lr: Rate = 0.0
    """DiLoCo: learning rate of local_sgd's outer Nesterov optimizer (usually 0.7); 0: plain averaging."""
    outer_momentum: Share = 0.9
    fragments: Count = 1
    """Of local_sgd: parts of the model that are averaged at different steps (Streaming DiLoCo)."""
    outer_delay: Natural = 0
    """With outer_lr: steps that ranks train on while what they have learned travels (Streaming DiLoCo)."""
    outer_bits: Literal[32, 8, 4, 2, 1] = 32
    """With outer_lr: what ranks have learned travels in so many bits a number; the rest is kept for the next time."""
    outer_density: Annotated[float, Interval(ge=1e-6, le=1)] = 1.0
    """With outer_lr: only this share of the numbers travels, the largest (SparseLoCo); the rest is kept."""
    gossip: bool = False
    """Of local_sgd: ranks average in pairs, which change each time (NoLoCo), instead of all together."""


@dataclass
class Lora:
    """Train low-rank adapters instead of the model's own weights."""

    rank: Annotated[int, Interval(ge=0, le=10_000_000)] = 0
    """Of the adapters; 0: no adapters, the whole model is trained."""
    alpha: Amount = 16.0
    """The adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("qkv", "output")
    """Last parts of the names of the linear layers that get one."""
    frozen_dtype: Literal["same", "bf16"] = "same"
    """Dtype in which the weights under an adapter are kept."""


@dataclass
class Fp8:
    """How train.precision fp8 rounds."""

    scaling: Literal["row", "tensor"] = "row"
    """A scale for each row of a product, and gradients of weights in bf16: then it does not matter how batches are cut
    over ranks. Or one for a whole tensor, and all three products in FP8."""


@dataclass
class Checkpoint:
    """What survives the run, in the folder checkpoints/ of the run."""

    every: Natural = 0
    """Steps between two checkpoints, and one at the end; 0: none. On SIGTERM and SIGUSR1 one is always saved."""
    every_seconds: Annotated[float, Interval(ge=0.1, le=1e9)] | None = None
    """Seconds between two checkpoints, by the first rank's clock, beside `every` or instead of it."""
    in_memory: Natural = 0
    """Steps between two copies of the state in host memory, which outlive the ranks and vanish with the run: with
    --max-restarts a lost rank costs at most so many steps, and the disk hears nothing of it. Where there are several
    nodes each keeps a copy of its neighbour's, so that a lost node costs no more. 0: none."""
    keep_last: Natural = 3
    """How many to keep; 0: all."""
    keep_best: bool = False
    """Save also after each evaluation that has found the lowest test loss so far, and keep that one: checkpoints/best
    leads to it."""
    asynchronous: bool = True
    """Write beside training: a step waits for the copy in memory only."""


@dataclass
class Metrics:
    """Where a run reports to, besides metrics.jsonl in its folder."""

    tensorboard: bool = True
    """Event files in the run's folder."""
    prometheus: str | None = None
    """A text file for node_exporter's textfile collector, replaced at each record: step, loss, tokens/s, MFU, exposed
    share, restarts."""
    wandb: str | None = None
    """A project of Weights & Biases (pip install -e ".[wandb]")."""
    mlflow: str | None = None
    """An experiment of MLflow, at the server that MLFLOW_TRACKING_URI names (pip install -e ".[mlflow]")."""


@dataclass
class Planned:
    """What lockstep plan has predicted for this run, to be shown beside what is measured."""

    step_ms: float | None = None
    memory_gib: float | None = None
    """Of the rank that holds most."""
    machine: str | None = None


@dataclass
class Config:
    """One run: what `lockstep train` reads from a file and from its flags."""

    model: Model = field(default_factory=CNN)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    lora: Lora = field(default_factory=Lora)
    fp8: Fp8 = field(default_factory=Fp8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    plan: Planned = field(default_factory=Planned)
