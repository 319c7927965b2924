"""Degrees of parallelism: into how many parts each axis cuts the work."""

from dataclasses import dataclass, fields, replace
from math import prod

from lockstep.errors import UserError


@dataclass(frozen=True)
class Degrees:
    """Their product is the number of ranks; one of them may be -1, "the rest".

    The order of the fields is the order of the mesh, outermost first: neighbours in the last dimension are neighbours
    on the machine, where the traffic is heaviest.
    """

    pp: int = 1
    """Pipeline stages: consecutive layers."""
    replicate: int = 1
    """Copies of the parameters; each reads other samples."""
    shard: int = 1
    """Ranks that hold one copy together (ZeRO, FSDP); each reads other samples."""
    cp: int = 1
    """Context parallel: each has other positions of the same sequences."""
    tp: int = 1
    """Tensor parallel: each has other rows or columns of the same matrices."""

    def resolve(self, ranks: int) -> "Degrees":
        """Replace -1 and check that the product is the number of ranks."""
        degrees = self.by_axis()
        bad = {axis: degree for axis, degree in degrees.items() if degree < 1 and degree != -1}
        rest = [axis for axis, degree in degrees.items() if degree == -1]
        if bad or len(rest) > 1:
            raise UserError(
                f"parallel degrees are {self}; each must be 1 or more, and at most one may be -1 (the rest)"
            )
        product = prod(degree for degree in degrees.values() if degree != -1)
        if rest and ranks % product == 0:
            return replace(self, **{rest[0]: ranks // product})
        if product != ranks:
            divisor = f"{product}, which must divide" if rest else f"{product}, but there are"
            raise UserError(f"parallel degrees {self} multiply to {divisor} {ranks} ranks")
        return self

    def by_axis(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """What is not 1: `replicate=2, shard=4`."""
        return ", ".join(f"{axis}={degree}" for axis, degree in self.by_axis().items() if degree != 1) or "all 1"


AXES = tuple(field.name for field in fields(Degrees))
