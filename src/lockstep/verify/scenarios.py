"""The situations in which a strategy must equal one process."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from lockstep.config import CNN, GPT, HF, Config, Model, Own, ResNet, Train
from lockstep.data import IGNORED, READS, Batch, DataSet, DataSpec, Streamed, build_data, called_with, tensors_in
from lockstep.errors import UserError
from lockstep.models import build_model, check_outputs, is_users, user_model
from lockstep.models.float8 import Scaling, in_float8
from lockstep.models.hf import vocabulary_of
from lockstep.models.initial import Deferred, fill_adapters, seeded
from lockstep.models.lora import add_lora
from lockstep.models.recompute import Recompute
from lockstep.verify.tangle import Tangle, mark_rows

SMALL_CNN = CNN(channels=(6,), hidden=16)
SMALL_GPT = GPT(d_model=16, layers=1, heads=2, context=12, vocabulary=31)
CUT_GPT = GPT(d_model=16, layers=2, heads=4, context=16, vocabulary=31)
"""For strategies that cut the model itself; no degree divides its vocabulary."""
EXPERT_GPT = replace(CUT_GPT, norm="rmsnorm", activation="swiglu", experts=8, expert_width=12)
"""Eight experts in each block, of which a token takes two."""


@dataclass(frozen=True)
class Scenario:
    """One model on one course of global batches."""

    name: str
    model: Model
    batch_sizes: tuple[int, ...]
    """Sizes of the global batches, repeated. A size below the number of ranks leaves ranks without a sample."""
    accumulation: int = 1
    clip_norm: float | None = None
    padding: bool = False
    """Mask a different number of targets in each sample, so that ranks count different tokens."""
    recompute: Recompute = "none"
    lora_rank: int = 0
    float8: Scaling | None = None
    """Linear layers of the blocks multiply in FP8."""
    unobserved: bool = False
    """Weights are read at every third step only, and communication comes late: a missing wait shows."""
    tangled: bool = False
    """The model has every trap that a wrapper must survive (`tangle.py`)."""
    config: Config | None = None
    """Of the user's own: its data and its loss."""

    @property
    def local_buffers(self) -> tuple[str, ...]:
        """Buffers that depend on what a rank has seen, so that no other number of ranks has the same."""
        return ("seen",) if self.tangled else ()

    @property
    def spec(self) -> DataSpec:
        if self.config is not None:
            return user_data(self.config).spec
        if isinstance(self.model, HF):
            return DataSpec("tokens", (self.model.context,), vocabulary_of(self.model.path))
        kind = READS[self.model.name][0]
        if kind == "tokens":
            assert isinstance(self.model, GPT)
            return DataSpec(kind, (self.model.context,), self.model.vocabulary or 256)
        return DataSpec(kind, (1, 8, 8) if kind == "images" else (16,), 10)

    @property
    def user_loss(self) -> str | None:
        """Where the user's own loss is imported from."""
        return self.config.train.loss if self.config is not None else None

    def build(self, seed: int) -> nn.Module:
        """The model, with its adapters."""
        model = self.unbuilt(seed)
        return model.whole() if isinstance(model, Deferred) else model

    def unbuilt(self, seed: int) -> nn.Module | Deferred:
        """The same as a strategy gets it: one of ours is made by the ranks that hold it."""
        if self.tangled:
            with seeded(seed):
                return Tangle()
        if not is_users(self.model):
            return Deferred(lambda: self._adapted(build_model(self.model, self.spec)), seed)
        return fill_adapters(self._adapted(build_model(self.model, self.spec, seed)), seed)

    def _adapted(self, model: nn.Module) -> nn.Module:
        if self.config is not None:
            switch_off_dropout(model)
        if self.lora_rank:
            add_lora(model, self.lora_rank, alpha=8.0, targets=("qkv", "down"))
        if self.float8 is not None:
            in_float8(model, self.float8)
        return model

    def train(self, optimizer: str) -> Train:
        """How it is trained."""
        lr = 0.05 if optimizer == "sgd" else 1e-3
        return Train(optimizer=optimizer, lr=lr, weight_decay=0.01)

    def global_batch(self, step: int) -> Batch:
        """The whole global batch of a step: the same on every rank, another one at every step."""
        batch = self._batch(self.batch_sizes[step % len(self.batch_sizes)], 7919 * step + 13)
        if self.tangled:
            mark_rows(batch.inputs, step)
        return batch

    def test_batch(self) -> Batch:
        """Seven samples, padded where there is padding: no number of ranks divides them."""
        return self._batch(7, 5)

    def _batch(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        if self.config is not None:
            split = user_data(self.config).train
            return split.batch(torch.randint(len(split), (size,), generator=generator))
        spec = self.spec
        if spec.kind == "tokens":
            inputs = torch.randint(spec.classes, (size, *spec.shape), generator=generator)
        else:
            inputs = torch.randn((size, *spec.shape), generator=generator)
        if spec.kind == "regression":
            return Batch(inputs, torch.randn((size, spec.classes), generator=generator))
        targets = torch.randint(spec.classes, inputs.shape if spec.kind == "tokens" else (size,), generator=generator)
        if self.padding and spec.kind == "tokens":
            lengths = torch.randint(1, spec.shape[0] + 1, (size, 1), generator=generator)
            targets[torch.arange(spec.shape[0]) >= lengths] = IGNORED
        return Batch(inputs, targets)


_loaded: dict[str, DataSet] = {}


def user_data(config: Config) -> DataSet:
    """Loaded once; of a stream, its first samples."""
    key = repr(config)
    if key not in _loaded:
        with torch.device("cpu"):  # also where a model is being built on the meta device
            dataset = build_data(config)
            if isinstance(dataset.train, Streamed):
                dataset = replace(dataset, train=dataset.train.head(256))
        _loaded[key] = dataset
    return _loaded[key]


def user_scenarios(config: Config) -> list[Scenario]:
    """The user's model on the user's data, even, uneven, and accumulated."""
    if isinstance(config.model, Own):
        check_outputs(config.model, user_data(config).spec, config.train.loss)
        with torch.device("meta"):
            model = user_model(config.model)
        check_repeats(config)
        batch_norms = [n for n, part in model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        if batch_norms:
            raise UserError(
                f"{batch_norms[0]} is a BatchNorm, which takes its statistics from each rank's own samples, so no "
                f"data-parallel run equals one process; use a GroupNorm or LayerNorm to verify with"
            )
    model_config = config.model
    return [
        Scenario("even", model_config, (16,), config=config),
        Scenario("uneven", model_config, (13, 6, 1), config=config),
        Scenario("accumulated", model_config, (12, 7), accumulation=3, clip_norm=0.1, config=config),
    ]


def switch_off_dropout(model: nn.Module) -> int:
    """Ranks draw other numbers than one process does. Returns how many modules drop something: by a layer of torch's,
    or by a share that they have as an attribute (attention_dropout = 0.1).
    """
    found = 0
    for part in model.modules():
        shares = [n for n, v in vars(part).items() if isinstance(v, float) and 0 < v < 1 and "drop" in n]
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            shares.append("p")
        for name in shares:
            setattr(part, name, 0.0)
        found += bool(shares)
    return found


def check_repeats(config: Config) -> None:
    """A model that draws numbers of its own in forward is never equal to itself."""
    model = build_model(config.model, user_data(config).spec, 0)
    switch_off_dropout(model)
    batch = user_data(config).train.batch(torch.arange(2))
    with torch.no_grad():
        first, second = (called_with(model, batch.inputs) for _ in range(2))
    outputs = zip(tensors_in(first), tensors_in(second), strict=True)
    if any(not torch.equal(a, b) for a, b in outputs if not (a.isnan().any() or b.isnan().any())):
        raise UserError(
            f"{type(model).__name__} gives two outputs for the same inputs: it draws random numbers in forward, by "
            f"something else than dropout that verify could switch off; verify it without"
        )


def saver_scenarios(model: Model | None) -> list[Scenario]:
    """The ways of saving memory, each with whatever strategy is being verified."""
    if model is not None and not isinstance(model, GPT):
        raise UserError(f"--savers recomputes attention and adapts a GPT's layers; {model.name} has none: use gpt")
    tokens = replace(model or SMALL_GPT, layers=2, dropout=0.0)
    return [
        Scenario("recompute full", tokens, (12, 7), clip_norm=0.1, padding=True, recompute="full"),
        Scenario("recompute every 2nd", tokens, (8,), accumulation=2, recompute="every"),
        Scenario("recompute attention", tokens, (8,), recompute="attention"),
        Scenario("LoRA, recomputed", tokens, (6,), accumulation=2, clip_norm=0.1, recompute="full", lora_rank=2),
    ]


def cut_scenarios(model: Model | None, parts: int = 1, positions: int = 1) -> list[Scenario]:
    """For strategies that cut the model itself: GPT-2's form with a tied head, and Llama's, untied, with fewer heads of
    keys than of queries; or one model on all. `parts`: of a pipeline, each of which needs a layer. `positions`: what
    sequences must be a multiple of.
    """
    if model is not None:
        return scenarios_for(model)
    layers = max(CUT_GPT.layers, parts - 2)  # embedding and head are layers too
    tied = replace(CUT_GPT, layers=layers, context=-(-CUT_GPT.context // positions) * positions)
    llama = replace(tied, kv_heads=2, tied=False, norm="rmsnorm", position="rope", activation="swiglu")
    return [
        Scenario("even", tied, (8,)),
        Scenario("uneven", llama, (13, 6, 1), clip_norm=0.1, unobserved=True),
        Scenario("accumulated", tied, (12, 7), accumulation=3, clip_norm=0.1, padding=True),
        Scenario("recomputed", llama, (8,), accumulation=2, recompute="full"),
        Scenario("LoRA", tied, (6,), accumulation=2, clip_norm=0.1, lora_rank=2),
    ]


def expert_scenarios(parts: int = 1, adapted: bool = True) -> list[Scenario]:
    """Blocks with experts: balanced by a loss or by a bias, with ranks and experts that get no token. `adapted`: with
    adapters too.
    """
    layers = max(EXPERT_GPT.layers, parts - 2)
    plain = replace(EXPERT_GPT, layers=layers)
    shared = replace(plain, kv_heads=2, tied=False, position="rope", shared_experts=1, scoring="sigmoid", z_loss=1e-3)
    biased = replace(plain, balance="bias", balance_coefficient=0.05, scoring="sigmoid", dense_layers=1)
    adapters = Scenario(
        "experts, LoRA", replace(plain, normalize=False, dense_layers=1), (6,), accumulation=2, lora_rank=2
    )
    return [
        Scenario("experts", plain, (8,)),
        Scenario("uneven experts", shared, (13, 6, 1), accumulation=3, clip_norm=0.1, padding=True),
        Scenario("biased experts", biased, (8, 1), accumulation=2, recompute="full"),
        *([adapters] if adapted else []),
    ]


def float8_scenarios(parts: int = 1) -> list[Scenario]:
    """Layers that multiply in FP8, each row by a scale of its own: then it does not matter how a batch is cut."""
    layers = max(CUT_GPT.layers, parts - 2)
    plain = replace(CUT_GPT, layers=layers)
    llama = replace(plain, kv_heads=2, tied=False, norm="rmsnorm", position="rope", activation="swiglu")
    return [
        Scenario("fp8", plain, (8,), float8="row"),
        Scenario("uneven, fp8", llama, (13, 6, 1), accumulation=3, clip_norm=0.1, padding=True, float8="row"),
        Scenario("recomputed, fp8", plain, (8, 1), accumulation=2, recompute="full", float8="row"),
    ]


def scenarios_for(model: Model | None) -> list[Scenario]:
    """A CNN on even and uneven batches, a GPT on padded ones, accumulated and clipped; or one model on all three."""
    if isinstance(model, ResNet) and model.norm == "batch":
        raise UserError(
            "model.norm batch takes its statistics from each rank's own samples, so no data-parallel run equals one "
            "process; use --model.norm group"
        )
    if isinstance(model, GPT | HF):
        model = replace(model, dropout=0.0)
    images, tokens = model or SMALL_CNN, model or SMALL_GPT
    return [
        Scenario("even", images, (16,)),
        Scenario("uneven", images, (13, 6, 1), clip_norm=0.1, unobserved=True),
        Scenario("accumulated", tokens, (12, 7), accumulation=3, clip_norm=0.1, padding=True),
    ]


TANGLED = Scenario("tangled", SMALL_CNN, (12, 5), clip_norm=0.1, tangled=True)
"""For engines that survive it: a parameter that some rank does not use, a late gradient, buffers, ..."""
