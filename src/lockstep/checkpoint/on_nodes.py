"""Checkpoints in the memory of several nodes, each with a copy of a neighbour's: a lost node takes nothing along.

No folder is common to the nodes. Saving, beside training:

1. every rank writes its files into the folder of its own node
2. it sends them to its partner on the next node (after the last comes the first), which writes them beside its own
3. the first rank's list of tensors goes to every node, and each node's first rank publishes the same manifest

Loading, after some of the nodes have been lost or replaced:

1. the nodes exchange which files of which step they hold complete; the newest step whose files are all held by
   some node is taken, and its lists go to the nodes that are new
2. every rank says which files its part of the model lies in, and what its node lacks is sent by a node that has it
"""

import os
import platform
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checkpoint import manifest
from lockstep.checkpoint.checkpoints import Checkpoints, Saved, load_checkpoint
from lockstep.comm.collectives import all_gather_objects
from lockstep.layout.world import World

LISTS = (manifest.METADATA, manifest.RUN, manifest.MANIFEST)
"""What every node has of a checkpoint. The manifest last: it is what makes a folder a checkpoint."""
Transfer = tuple[str, int, int]
"""A file, the rank that has it, the rank that gets it."""


def nodes_of(home: Path, world: World, group: dist.ProcessGroup | None) -> list[list[int]]:
    """The ranks of each node, the first rank's node first. A node is a place that keeps memory of its own."""
    if group is None:
        return [[world.rank]]
    places = all_gather_objects((platform.node(), str(home)), group)
    return [[rank for rank, p in enumerate(places) if p == place] for place in dict.fromkeys(places)]


def partner(rank: int, nodes: list[list[int]]) -> int:
    """Who keeps the copy of what a rank holds: on the next node, the one in its place."""
    at = next(i for i, node in enumerate(nodes) if rank in node)
    following = nodes[(at + 1) % len(nodes)]
    return following[nodes[at].index(rank) % len(following)]


class CheckpointsOnNodes(Checkpoints):
    """Of a group of ranks that live on more than one node; `folder` is this node's own."""

    def __init__(
        self, world: World, folder: Path, nodes: list[list[int]], group: dist.ProcessGroup, **how: Any
    ) -> None:
        super().__init__(world, folder, group=group, **how)
        self.nodes = nodes
        self._held: dict[int, set[str]] = {}
        """By the first rank of each node: the files of the checkpoint that was found which lie there, whole."""

    @property
    def publishes(self) -> bool:
        return any(self.world.rank == node[0] for node in self.nodes)

    # ---- saving ----------------------------------------------------------------------------------------------

    def _copy(self, part: Path, files: list[dict[str, dict[str, Any]]]) -> str | None:
        moves = [(name, rank, partner(rank, self.nodes)) for rank, mine in enumerate(files) for name in mine]
        problem = self._transfer(part, [move for move in moves if move[0] != manifest.METADATA])
        return self._spread(part, (manifest.METADATA,), source=0) or problem

    # ---- loading ---------------------------------------------------------------------------------------------

    def find(self, one: Path | None = None) -> tuple[Path | None, list[str]]:
        """The newest step that the nodes have together; every rank gets the same answer."""
        mine = {f.name: _whole_files(f) for f in self.all()} if self.publishes else {}
        everyone = self._gather(mine)
        damage = []
        for name in sorted({name for found in everyone for name in found}, reverse=True):
            holders = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
            source = next((rank for rank, (listed, whole) in holders.items() if set(LISTS[:2]) <= whole), None)
            if source is None:
                damage.append(f"{name}: no node has its lists")
                continue
            wanted = holders[source][0]
            self._held = {rank: whole for rank, (listed, whole) in holders.items() if listed == wanted}
            lost = sorted(set(wanted) - set().union(*self._held.values()))
            if lost:
                damage.append(f"{name}: no node has {lost[0]}")
                continue
            problem = self._agree(self._spread(self.folder / name, LISTS, source))
            if problem is not None:
                damage.append(f"{name}: {problem}")
                continue
            return self.folder / name, damage
        return None, damage

    def load(self, folder: Path, strategy: Saved) -> dict[str, Any]:
        return load_checkpoint(folder, strategy, self.world, self.group, fetch=lambda names: self._fetch(folder, names))

    def _fetch(self, folder: Path, names: set[str]) -> None:
        """Get what this rank's state lies in, and its node does not have, from a node that does."""
        everyone = self._gather(names)
        transfers: list[Transfer] = []
        for node in self.nodes:
            missing = set().union(*(everyone[rank] for rank in node)) - self._held.get(node[0], set())
            for name in sorted(missing):
                source = next(rank for rank, whole in self._held.items() if name in whole)
                transfers.append((name, source, node[0]))
        problem = self._transfer(folder, transfers)
        if problem is None:
            listed = manifest.listed(folder)
            mine = [name for name, _, to in transfers if to == self.world.rank]
            damage = [manifest.damage_of(folder / name, *listed[name]) for name in mine]
            problem = next((d for d in damage if d is not None), None)
        problem = self._agree(problem)
        if problem is not None:
            raise manifest.DamagedError(f"{folder}: {problem}")

    # ---- what ranks send each other ----------------------------------------------------------------------------

    def _spread(self, folder: Path, names: Iterable[str], source: int) -> str | None:
        """Small files of one rank, to every node; what went wrong on this rank."""
        content: dict[str, bytes] = {}
        problem = None
        if self.world.rank == source:
            problem = self._attempt(lambda: content.update({name: (folder / name).read_bytes() for name in names}))
        sent: list[Any] = [content]
        dist.broadcast_object_list(sent, group=self.group, group_src=source)
        if self.publishes and self.world.rank != source and sent[0]:
            problem = self._attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
            for name, block in sent[0].items():
                problem = problem or self._attempt(partial(_write, folder / name, block))
        return problem

    def _transfer(self, folder: Path, transfers: list[Transfer]) -> str | None:
        """Every rank has the same list; what went wrong on this rank. Whatever does, every message is received.

        Sends are posted first, so that no order of receiving can block another rank.
        """
        rank, blocks = self.world.rank, dict[str, torch.Tensor]()
        mine = {name for name, source, _ in transfers if source == rank}
        problem = self._attempt(lambda: blocks.update({name: _read(folder / name) for name in mine}))
        sizes: dict[str, int] = {}
        for found in self._gather(None if problem else {name: block.numel() for name, block in blocks.items()}):
            if found is None:
                return problem or "another rank could not read its files"
            sizes.update(found)
        transfers = [t for t in transfers if sizes[t[0]]]
        sending = [
            dist.isend(blocks[name], group=self.group, group_dst=to) for name, src, to in transfers if src == rank
        ]
        for name, source, to in transfers:
            if to == rank:
                block = torch.empty(sizes[name], dtype=torch.uint8)
                dist.recv(block, group=self.group, group_src=source)
                problem = problem or self._attempt(partial(_write, folder / name, block.numpy().tobytes()))
        for work in sending:
            if work is not None:
                work.wait()
        return problem


def _whole_files(folder: Path) -> tuple[dict[str, tuple[int, str]], set[str]]:
    """What a checkpoint's manifest lists, and which of that lies in its folder byte for byte."""
    try:
        listed = manifest.listed(folder)
    except manifest.DamagedError:
        return {}, set()
    return listed, {name for name, known in listed.items() if manifest.damage_of(folder / name, *known) is None}


def _read(file: Path) -> torch.Tensor:
    content = file.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _write(file: Path, content: bytes) -> None:
    if not manifest.is_plain_name(file.name):
        raise ValueError(f"{file.name!r} is not the name of a file")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(file)
