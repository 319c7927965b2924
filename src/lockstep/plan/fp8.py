"""Does FP8 pay? For one plan, and from which width of layers on."""

from dataclasses import replace

from lockstep.config import GPT
from lockstep.plan.describe import network_of_gpt
from lockstep.plan.search import ScoredLayout
from lockstep.plan.setting import Setting
from lockstep.plan.step import Clock, step_time

WIDTHS = range(256, 16_384 + 1, 128)
HEAD = 64


def seconds_in_fp8(plan: ScoredLayout) -> float | None:
    """Of a step; None where the machine has no units, the layout does not go with it, or nothing fuses the rounding."""
    setting = plan.setting
    has_units = "fp8" in setting.machine.peak_tflops
    ours = setting.software.lockstep_engines and setting.software.fused and not setting.software.frozen
    if not has_units or not ours or setting.precision != "bf16" or setting.layout.tp > 1:
        return None
    return step_time(replace(setting, precision="fp8")).seconds


def least_width(setting: Setting) -> int | None:
    """Of a GPT's blocks that are faster in FP8, with the tokens that the layout gives a rank at once; None: of none."""
    return next(
        (width for width in WIDTHS if block_seconds(setting, width, "fp8") < block_seconds(setting, width)), None
    )


def block_seconds(setting: Setting, width: int, precision: str = "bf16") -> float:
    """Forward and backward of one block."""
    network = network_of_gpt(GPT(d_model=width, layers=1, heads=width // HEAD, context=setting.network.context))
    clock = Clock(replace(setting, network=network, precision=precision))
    block = network.layers[0][0]
    forward = clock.forward(block)
    return sum(forward.values()) + sum(clock.backward(block, forward).values())


def advice(plan: ScoredLayout) -> str | None:
    """One line, where there is something to say."""
    seconds = seconds_in_fp8(plan)
    if seconds is None:
        return None
    width = least_width(plan.setting)
    whose = "no GPT's blocks gain" if width is None else f"a GPT's blocks gain from width {width:,} on"
    change = f"{1e3 * seconds:,.0f} ms, {plan.time.seconds / seconds:.2f} times as fast"
    return f"with --train.precision fp8 a step would take {change}; here {whose}"
