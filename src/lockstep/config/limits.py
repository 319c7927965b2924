"""Types of a config's fields, with their limits. The upper ones catch slips of the finger."""

from typing import Annotated, Any

from annotated_types import Interval
from tyro.conf import Suppress, arg

Width = Annotated[int, Interval(ge=1, le=10_000_000)]
Count = Annotated[int, Interval(ge=1, le=10**12)]
Natural = Annotated[int, Interval(ge=0, le=10**12)]
Degree = Annotated[int, Interval(ge=-1, le=10**12)]
"""Of an axis; -1: the rest of the ranks."""
Layers = Annotated[int, Interval(ge=1, le=100_000)]
Tokens = Annotated[int, Interval(ge=1, le=1_000_000_000)]
Share = Annotated[float, Interval(ge=0, le=1)]
Dropout = Annotated[float, Interval(ge=0, le=0.99)]
Decay = Annotated[float, Interval(ge=0, le=0.999999999)]
Rate = Annotated[float, Interval(ge=0, le=1e6)]
Amount = Annotated[float, Interval(ge=0, le=1e9)]

Import = Annotated[str | None, arg(name="import")]
"""A key called `import`, which Python allows no field to be called."""
Args = Annotated[dict[str, Any], Suppress]
"""What an imported object is called with: keys of a section of its own, `--model.args.width 64`."""
