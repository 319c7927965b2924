"""What the commands share in their arguments. No torch here: flags are parsed before it is imported."""

from dataclasses import dataclass, field, fields
from typing import Annotated

import tyro

from lockstep.config import (
    CNN,
    Checkpoint,
    Config,
    Data,
    Fp8,
    Lora,
    Metrics,
    Model,
    Parallel,
    Planned,
    Train,
    check_ranges,
)
from lockstep.config.trust import Consent
from lockstep.launch.options import Launch

LinkFlag = Annotated[
    str | None,
    tyro.conf.arg(
        help="Run on 2 nodes x 2 ranks (or --nproc in all) joined by a network of this rate, and perhaps one-way "
        "latency: 1gbit, 100mbit,5ms. The nodes are Linux network namespaces of this machine: needs root and iproute2."
    ),
]


@dataclass
class ReadsRun:
    """What every command takes that reads the folder of a run, which may be a stranger's."""

    model_import: Annotated[str | None, tyro.conf.arg(name="model.import")] = None
    """The import that the run's config names for its model, if it has one: without it, no code of the folder is run."""
    data_import: Annotated[str | None, tyro.conf.arg(name="data.import")] = None
    """Likewise for its data, of an old run that does not say what its samples look like."""
    trust: bool = False
    """Run whatever code the run's config names."""
    older: bool = False
    """Where the newest checkpoint is damaged, take the newest whole one."""

    @property
    def consent(self) -> Consent:
        return Consent(tuple(filter(None, (self.model_import, self.data_import))), self.trust, self.older)


@dataclass
class RunArguments:
    """What every command takes that runs a config."""

    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    model: Model = field(default_factory=CNN)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    lora: Lora = field(default_factory=Lora)
    fp8: Fp8 = field(default_factory=Fp8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    plan: Planned = field(default_factory=Planned)

    def config(self) -> Config:
        config = Config(**{section.name: getattr(self, section.name) for section in fields(Config)})
        check_ranges(config)
        return config
