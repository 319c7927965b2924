"""`lockstep strategies`."""

from dataclasses import dataclass, field, replace

from torch import nn

from lockstep.cli.flags import config_from
from lockstep.cli.parsing import parse
from lockstep.cli.tables import console, new_table
from lockstep.config import GPT, Config, Data, Model, Train
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.layout import Degrees
from lockstep.measure.expected import theory_of
from lockstep.models import on_meta, parameter_count
from lockstep.models.experts import mixtures_in
from lockstep.strategies import STRATEGIES, available_strategies, degrees_of, strategy_named
from lockstep.strategies.combining import check_cuts

DEFAULT = GPT(size="small", context=1024, vocabulary=50304)
AXES = {
    "bucketed,tp=2": ("every matrix, by rows or columns", "8 A(n-1)/n per block"),
    "bucketed,tp=2:sequence": ("and activations, by positions", "8 A(n-1)/n per block"),
    "bucketed,cp=2": ("sequences; keys and values go round", "3(n-1) KV per block"),
    "bucketed,cp=2:ulysses": ("sequences; positions for heads", "2 (2 Q + KV)(n-1)/n per block"),
    "bucketed,pp=2:1f1b": ("layers; stages work beside each other", "A to each neighbour"),
    "bucketed,pp=2:zb-h1": ("layers; weights' gradients fill gaps", "A to each neighbour"),
}
WITH_EXPERTS = {
    "bucketed,ep=2": ("experts; tokens travel to them and back", "4 T k d (n-1)/n per mixture"),
    "zero3,ep=2": ("experts, and all is sharded over its copies", "3Ψ(n-1)/n, and as above"),
}


@dataclass
class StrategiesArguments:
    """List every strategy, one line each: what is cut, what travels, what a rank holds and sends, as formula and in
    numbers.

    For example:

    lockstep strategies

    lockstep strategies --model.name gpt --model.size xl --world-size 8 --batch-size 16
    """

    model: Model = field(default_factory=GPT)
    """A config file may come first. Without one and without a --model flag: GPT-2 small."""
    world_size: int = 2
    """Ranks to compute with."""
    batch_size: int = 8
    """The global batch, for what grows with it."""


def main(argv: list[str]) -> int:
    config, rest = config_from(argv, Config(model=DEFAULT))
    arguments = parse(StrategiesArguments, rest, "strategies", default=StrategiesArguments(model=config.model))
    ranks = arguments.world_size
    if ranks < 1 or arguments.batch_size < 1:
        raise UserError(f"--world-size is {ranks} and --batch-size {arguments.batch_size}; both must be 1 or more")
    model = arguments.model
    spec = DataSpec("images", (3, 32, 32), 10)
    if isinstance(model, GPT):
        spec = DataSpec("tokens", (model.context,), model.vocabulary or 256)
    psi, of_experts = parameter_count(on_meta(model, spec)), expert_parameters(on_meta(model, spec))
    config = Config(model=model, data=Data(name="synthetic"), train=Train(batch_size=arguments.batch_size))
    out = console()
    out.print(f"[bold]{model.name}[/], Ψ = {psi:,} parameters in fp32 with Adam, n = {ranks} ranks")
    headings = ("sends, by formula", "what it does, what it cuts")
    table = new_table("", ("strategy",), ("holds\nMiB/rank", "sends\nMB/step"), headings)
    for name in available_strategies():
        add_row(table, name, config, spec, (psi, of_experts), ranks)
    for name, (cut, formula) in (AXES | WITH_EXPERTS if of_experts else AXES).items():
        add_row(table, name, config, spec, (psi, of_experts), ranks, cut, formula)
    out.print(table)
    out.print(
        "holds: parameters, gradients and Adam's two moments; 16 bytes per element where nothing is divided.\n"
        "Ψ: trained elements, 4 bytes each. A: a block's input. KV, Q: keys and values, queries of a rank.\n"
        "K: steps between averages; c copies of s ranks. A dash: it depends on more than this, or is not counted."
        + ("\nT: a rank's tokens, of which each goes to k experts, in rows of d; all used alike." if of_experts else "")
    )
    return 0


def add_row(
    table: object,
    name: str,
    config: Config,
    spec: DataSpec,
    parameters: tuple[int, int],
    ranks: int,
    cut: str = "",
    formula: str = "",
) -> None:
    """`parameters`: of the whole model, and of its experts."""
    parallel = strategy_named(name, config.parallel)
    facts = STRATEGIES[parallel.data].facts(parallel)
    cells = [name, "-", "-", formula or facts.sends, cut or facts.says]
    try:
        degrees = degrees_of(parallel, ranks)
        check_cuts(on_meta(config.model, spec), parallel, 1)
        theory = theory_of(replace(config, parallel=parallel), spec, ranks)
    except UserError:
        theory, degrees = None, Degrees()
    else:
        cells[1] = f"{held_mib(facts.divides, degrees, parallel.ep, *parameters):,.0f}"
    if theory is not None:
        cells[2] = f"{theory.wire_bytes / 1e6:,.1f}"
    table.add_row(*cells)  # type: ignore[attr-defined]


def held_mib(divided: tuple[bool, bool, bool], degrees: Degrees, ep: int, psi: int, of_experts: int) -> float:
    """Parameters, gradients and two moments; what the axes of the model cut, each rank has a part of."""
    ranks = (degrees.shard if degrees.shard > 1 else degrees.replicate) * degrees.cp
    mine = (psi - of_experts + of_experts / ep) / (degrees.tp * degrees.pp)
    sharded = psi / (degrees.tp * degrees.pp) / ranks  # experts over their copies, of which there are fewer
    return 4 * sum(weight * (sharded if so else mine) for weight, so in zip((1, 1, 2), divided, strict=True)) / 2**20


def expert_parameters(model: nn.Module) -> int:
    return sum(p.numel() for mixture in mixtures_in(model).values() for p in mixture.experts.parameters())
