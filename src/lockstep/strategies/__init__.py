"""How one training step is spread over the ranks: engines by hand and native, behind one interface.

`parallelize(model, layout, options)` gives a `ParallelModel`; `STRATEGIES` is the table of all engines.
"""

from lockstep.strategies.axes import strategy_name
from lockstep.strategies.engine import Engine
from lockstep.strategies.options import Options
from lockstep.strategies.parallel_model import ParallelModel
from lockstep.strategies.parallelize import make_layout, parallelize
from lockstep.strategies.step import StepResult
from lockstep.strategies.table import (
    STRATEGIES,
    VARIANTS,
    available_strategies,
    check_parallel,
    degrees_of,
    expected_traffic,
    strategy_named,
    strategy_names,
)

__all__ = [
    "STRATEGIES",
    "VARIANTS",
    "Engine",
    "Options",
    "ParallelModel",
    "StepResult",
    "available_strategies",
    "check_parallel",
    "degrees_of",
    "expected_traffic",
    "make_layout",
    "parallelize",
    "strategy_name",
    "strategy_named",
    "strategy_names",
]
