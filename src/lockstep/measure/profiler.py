"""torch.profiler without its announcements, and what it has seen as plain data."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def profiler_for(device: torch.device, **options: Any) -> profile:
    """A context; afterwards `trace_of` it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces its start on stderr
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *gpu], **options)


def trace_of(profiler: profile) -> dict[str, Any]:
    """Its Chrome trace, which it gives as a file only."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_bytes())
        return trace
