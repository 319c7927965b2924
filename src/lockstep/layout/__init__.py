"""Axes and groups: who does what, who communicates with whom, and what each rank holds."""

from lockstep.layout.degrees import AXES, Degrees
from lockstep.layout.group import ALONE, Group, GroupLike, group_of
from lockstep.layout.layout import Layout
from lockstep.layout.region import Box, Held, Region
from lockstep.layout.world import World

__all__ = ["ALONE", "AXES", "Box", "Degrees", "Group", "GroupLike", "Held", "Layout", "Region", "World", "group_of"]
