"""How sure a predicted time is: what the published results left over, of models of the same kind."""

from lockstep.plan.setting import Setting

DENSE = (0.92, 1.11)
ROUTED = (0.91, 1.21)
"""Predicted times have to be multiplied by something between these to be right, in four of five published rows
(`lockstep plan check`; a test holds them to the constants' own residuals)."""


def interval(setting: Setting) -> tuple[float, float]:
    routed = any(block.is_routed for block, _ in setting.network.layers)
    return ROUTED if routed else DENSE
