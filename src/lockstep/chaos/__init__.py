"""Does it survive? Faults, injected into real runs: named in time, gone on with, equal to the end, nothing left."""
