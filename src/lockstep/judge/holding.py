"""What a rank holds of each parameter of a model: plain, or under the wrappers that people use.

DeepSpeed's ZeRO and our own wrappers are asked; of FSDP1's rows it is read which elements are here.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.errors import UserError
from lockstep.judge.deepspeed import zero_of, zero_pieces
from lockstep.judge.piece import INSIDE, Piece, modules_of
from lockstep.layout.region import Box, Region, is_dtensor, region_of

Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]
_said = WeakTensorKeyDictionary()
"""Parameter -> (name, boxes), as the script has said."""


def region(parameter: Tensor, name: str, boxes: Boxes) -> None:
    """Say what this rank's parameter is of the one-process model's, where the sharding is home-made.

        lockstep.judge.region(layer.weight, "layers.0.weight", [((offset, 0), (rows, columns))])

    `boxes`: offsets and sizes in the whole parameter, in the order of the rank's own memory. Without `lockstep judge`
    it does nothing that is seen.
    """
    said = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes)
    if (count := sum(box.numel for box in said)) != parameter.numel():
        raise UserError(f"the boxes of {name} have {count} elements, and the parameter has {parameter.numel()}")
    _said[parameter] = name, said


def pieces(model: nn.Module) -> list[Piece]:
    """Of all parameters; one that is in several places has the name of the first."""
    if (holder := as_holder(model)) is not None:
        in_flight = getattr(getattr(holder, "optimizer", None), "wait_for_parameters", None)
        if in_flight is not None:  # gathers that the next forward waits for
            in_flight()
        return [_held(name, held) for name, held in holder.held().items()]
    if zero_of(model) is not None:
        return list(zero_pieces(model))
    modules, seen, found = list(modules_of(model)), set(), list[Piece]()
    flattened = _flattened(module for _, module in modules)
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if hasattr(parameter, "_fqns"):
                found += _of_flat(prefix, parameter)
            else:
                found.append(_of(prefix + key, parameter, flattened.get(id(parameter))))
    return found


def gradient_pieces(model: nn.Module, held: list[Piece], parameters: set[int]) -> list[Piece]:
    """What this rank has gradients of, of these parameters."""
    mine = [piece for piece in held if id(piece.parameter) in parameters]
    if (holder := as_holder(model)) is not None:
        names = {piece.name for piece in mine or held}
        return [_held(name, one) for name, one in holder.trained().items() if name in names]
    return mine


def as_holder(model: nn.Module) -> Any:
    """One of our wrappers, which knows what it holds; None: another module."""
    known = sys.modules.get("lockstep.parallel.holding")
    if known is None:
        return None
    return next((one for prefix, one in modules_of(model) if not prefix and isinstance(one, known.Holder)), None)


def _held(name: str, held: Any) -> Piece:
    boxes = None if held.region.is_whole else held.region.boxes
    return Piece(name, held.parameter, boxes, held.region.shape, trains=held.parameter.requires_grad)


def plain_piece(name: str, parameter: Any) -> Piece:
    """Of a parameter that is in no module."""
    return _of(name, parameter, None)


def _of(name: str, parameter: Any, held: Region | None) -> Piece:
    trains = parameter.requires_grad
    if parameter in _said:
        own_name, boxes = _said[parameter]
        return Piece(own_name, parameter, boxes, None, trains=trains)
    if held is None and not is_dtensor(parameter) and (held := region_of(parameter)).is_whole:
        return Piece(name, parameter, None, tuple(parameter.shape), trains=trains)
    held = held or region_of(parameter)
    return Piece(name, parameter, held.boxes, held.shape, trains=trains)


def _flattened(modules: Iterable[nn.Module]) -> dict[int, Region]:
    """Of FSDP1 with the original parameters: each is a view of this rank's part of it."""
    found = {}
    for module in modules:
        flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None and flat._params is not None:
            for i, parameter in enumerate(flat._params):
                found[id(parameter)] = _region_in(flat, i)
    return found


def _region_in(flat: Any, i: int) -> Region:
    """Which elements of its `i`th parameter this rank has."""
    whole = Region.whole(flat._shapes[i])
    infos = getattr(flat, "_shard_param_infos", None)
    if infos is None:
        return whole
    info = infos[i]
    return whole.part(info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else whole.part(0, 0)


def _of_flat(prefix: str, flat: Any) -> Iterator[Piece]:
    """The parameters that FSDP1 has in one row, of which this rank has a part."""
    begin = 0
    for i, fqn in enumerate(flat._fqns):
        held = _region_in(flat, i)
        name = prefix + ".".join(part for part in fqn.split(".") if part not in INSIDE)
        yield Piece(name, flat, held.boxes, held.shape, slice(begin, begin + held.numel))
        begin += held.numel
