"""What all tests share: no deadline for examples, and a place of the checkout's own for what DeepSpeed compiles.

No test asserts how long something takes: a machine that is busy with other things is no fault of ours.

DeepSpeed compiles under a lock that is a mere file, in a folder of the user's: one that a killed run of anything has
left there would be waited for for ever. Here nobody else compiles, so what lies here at the start is a leftover.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")

COMPILED = Path(__file__).parents[1] / ".torch_extensions"

os.environ["TORCH_EXTENSIONS_DIR"] = str(COMPILED)
for lock in COMPILED.glob("*/lock"):
    lock.unlink(missing_ok=True)
