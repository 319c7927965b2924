"""Writes the live pages of the site into docs/_live, from the code itself; `make docs` calls it.

    ring.html        all-reduces turn by turn: comm/algorithms.py's run here, over queues in place of a network
    experts.html     tokens sent to their experts: models/experts.py's routing and sorting
    overlap.html     buckets beside backward, by parallel/data/bucket.py's way of filling them
    schedules.html   pipeline schedules, as lockstep schedule draws them
    zero.html        what a rank holds at each ZeRO stage, by the planner

python docs/make_live.py
"""

import json
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.algorithms import ALGORITHMS
from lockstep.models.experts import MixtureOfExperts
from lockstep.models.sorted_choices import sorted_by_expert
from lockstep.parallel.data.bucket import assign_buckets
from lockstep.parallel.pipeline.schedule import pipeline_schedule, placement_of
from lockstep.parallel.pipeline.timetable import Costs, timetable
from lockstep.plan.known import known_model
from lockstep.plan.layout import PlanLayout
from lockstep.plan.machine import parse_cluster
from lockstep.plan.memory import memory_of
from lockstep.plan.search import Question
from lockstep.schedule.page import write_page

LIVE = Path(__file__).parent / "_live"
RANKS = 4
SHOWN = ("naive", "tree", "ring", "recursive_doubling", "halving_doubling")


class Queues:
    """Stands in for a network: what is sent from one rank to another, in order; and all that was sent, by turns."""

    def __init__(self, size: int) -> None:
        self.lines = {(a, b): queue.Queue[Any]() for a in range(size) for b in range(size)}
        self.sent: list[dict[str, int]] = []
        self.held: list[dict[str, Any]] = []


class QueueWire:
    """What the algorithms know of a wire: `rank`, `size`, `exchange`, `send`, `receive`."""

    ranks_per_node = 1

    def __init__(self, rank: int, size: int, queues: Queues, flat: Tensor) -> None:
        self.rank, self.size, self.ranks, self.queues, self.flat = rank, size, list(range(size)), queues, flat
        self.turn = 0

    def among(self, ranks: list[int]) -> "QueueWire":
        assert ranks == self.ranks, "for numbers of ranks that are a power of two"
        return self

    def look(self) -> None:
        """What this rank holds now."""
        self.queues.held.append({"turn": self.turn, "rank": self.rank, "values": [int(v) for v in self.flat]})

    def exchange(self, send: Sequence[Any] = (), receive: Sequence[Any] = ()) -> "Arriving":
        self.look()
        for tensor, to in send:
            if tensor.numel():
                row = {"turn": self.turn, "from": self.rank, "to": to, "elements": tensor.numel()}
                self.queues.sent.append({**row, "first": self._place(tensor)})
                self.queues.lines[self.rank, to].put((self.turn, tensor.clone()))
        return Arriving(self, [(tensor, source) for tensor, source in receive if tensor.numel()])

    def send(self, tensor: Tensor, to: int) -> None:
        self.exchange(send=[(tensor, to)]).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        self.exchange(receive=[(tensor, source)]).wait()

    def _place(self, tensor: Tensor) -> int:
        """Where in the whole it lies."""
        return (tensor.data_ptr() - self.flat.data_ptr()) // tensor.element_size()


class Arriving:
    def __init__(self, wire: QueueWire, messages: list[Any]) -> None:
        self.wire, self.messages = wire, messages

    def wait(self) -> None:
        wire, turn = self.wire, self.wire.turn
        for tensor, source in self.messages:
            sent_in, content = wire.queues.lines[source, wire.rank].get(timeout=30)
            tensor.copy_(content)
            turn = max(turn, sent_in)
        wire.turn = turn + 1
        self.messages = []


def played(algorithm: str, size: int) -> dict[str, Any]:
    """Every rank a thread; rank r's numbers are 2^r, so that a sum says whose numbers are in it."""
    queues = Queues(size)
    flats = [torch.full((size,), float(2**rank), dtype=torch.float64) for rank in range(size)]
    wires = [QueueWire(rank, size, queues, flats[rank]) for rank in range(size)]

    def add(target: Tensor, received: Tensor, out: Tensor) -> None:
        torch.add(target, received, out=out)

    def run(rank: int) -> None:
        ALGORITHMS[algorithm](wires[rank], flats[rank], add)  # type: ignore[arg-type]
        wires[rank].look()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(bool((flat == 2**size - 1).all()) for flat in flats), algorithm
    turns = 1 + max(message["turn"] for message in queues.sent)
    messages = sorted(queues.sent, key=lambda m: (m["turn"], m["from"]))
    held = sorted(queues.held, key=lambda h: h["turn"])
    return {"name": algorithm, "ranks": size, "turns": turns, "messages": messages, "held": held}


def memory_by_stage() -> dict[str, Any]:
    """Llama 2 7B in bf16, one sample on a rank, recomputed: GiB by ranks, stage and kind, by the planner."""
    network = known_model("llama2-7b")
    assert network is not None
    found = {}
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        question = Question(network, parse_cluster(f"{max(1, ranks // 8)}x{min(8, ranks)}xh100"), ranks)
        for stage in range(4):
            layout = PlanLayout(dp=ranks, zero=stage, micro_batch=1, global_batch=ranks, recompute="full")
            kinds = memory_of(question.setting(layout)).kinds
            found[f"{ranks}/{stage}"] = {kind: nbytes / 2**30 for kind, nbytes in kinds.items()}
    return {"capacity": 80, "held": found}


LAYERS, LAYER_MB, BACKWARD_MS = 24, 4.0, 2.0
LATENCY_MS, GB_PER_S = 0.2, 2.0


def overlap(cap_mb: float) -> dict[str, Any]:
    """Backward of equal layers, and the all-reduces of its buckets on two ranks over one link, one after the other."""
    sizes = [LAYER_MB * 2**20] * LAYERS
    gradients = [torch.empty(int(size) // 4, device="meta") for size in sizes]
    buckets = assign_buckets(gradients, cap_mb * 2**20)  # from the last layer on
    free, spans, layer = 0.0, [], 0
    for bucket in buckets:
        layer += len(bucket)
        ready = layer * BACKWARD_MS
        start = max(ready, free)
        free = start + 2 * LATENCY_MS + sum(t.nbytes for t in bucket) / (GB_PER_S * 1e6)  # 2(n-1)/n is 1 on two ranks
        spans.append({"layers": len(bucket), "ready": ready, "start": start, "end": free})
    backward = LAYERS * BACKWARD_MS
    total = sum(span["end"] - span["start"] for span in spans)
    return {"cap": cap_mb, "backward": backward, "spans": spans, "exposed": max(0.0, free - backward), "total": total}


EXPERTS, ACTIVE, TOKENS = 8, 2, 10
ROUTERS = {
    "balanced": "each expert has about as many tokens as the others",
    "collapsed": "two experts are liked best by nearly every token, as happens without a balance",
    "one rank without tokens": "the last rank of an uneven batch has none, and takes part all the same",
}


def exchanges(router: str) -> dict[str, Any]:
    """What each rank has at each step of a forward pass: rows of (rank and number of the token, expert)."""
    torch.manual_seed(3)
    moe = MixtureOfExperts(16, 8, EXPERTS, ACTIVE)
    liked = torch.zeros(EXPERTS)
    if router == "collapsed":
        liked[2:4] = 1.0
    home, arrived = [], [[] for _ in range(RANKS)]
    for rank in range(RANKS):
        count = 0 if router == "one rank without tokens" and rank == RANKS - 1 else TOKENS
        tokens = torch.randn(count, 16) + moe.router.weight.T @ liked
        chosen = moe.route(tokens).chosen
        home.append([{"rank": rank, "token": i // ACTIVE, "expert": int(e)} for i, e in enumerate(chosen.flatten())])
    in_order = [by_expert(rows) for rows in home]
    held = EXPERTS // RANKS
    for rows in in_order:  # what an all-to-all does: from each rank to each, in order
        for row in rows:
            arrived[row["expert"] // held].append(row)
    moved = sum(row["rank"] != rank for rank, rows in enumerate(arrived) for row in rows)
    most, total = max(map(len, arrived)), sum(map(len, arrived))
    tokens_at_home = [[{**row, "expert": None} for row in rows[::ACTIVE]] for rows in home]
    steps = [
        ("tokens", tokens_at_home, f"Each rank has tokens of its own, rank.number. Here {ROUTERS[router]}."),
        ("1. route", home, f"The router gives each token {ACTIVE} of {EXPERTS} experts: one row for each choice."),
        ("2. sort", in_order, "Each rank sorts its rows by expert: what goes to one rank lies together."),
        ("3. dispatch", arrived, f"An all-to-all takes {moved} of {total} rows to another rank (outlined)."),
        (
            "4. compute",
            [by_expert(rows) for rows in arrived],
            f"Each rank sorts what it has received by expert, and computes. The busiest has {most} rows, "
            f"{most * RANKS / total:.2f} times the mean: the others wait for it.",
        ),
        ("5. return", in_order, "The opposite all-to-all brings the results back, in the order in which they left."),
        ("6. combine", tokens_at_home, "Each token adds up its results, weighted by the router. Backward goes back."),
    ]
    shown = [{"name": name, "rows": rows, "said": said} for name, rows, said in steps]
    return {"name": router, "ranks": RANKS, "experts": EXPERTS, "steps": shown}


def by_expert(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    if not rows:
        return rows
    order = sorted_by_expert(torch.tensor([row["expert"] for row in rows]), EXPERTS).order
    return [rows[i] for i in order]


def page(title: str, text: str, script: str, data: Any) -> str:
    here = Path(__file__).parent
    style = (here / "live.css").read_text(encoding="utf-8")
    code = "".join((here / file).read_text(encoding="utf-8") for file in ("live.js", script))
    values = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{style}</style><h1>{title}</h1><p>{text}</p><main></main>"
        f"<script>const data = {values};\n{code}</script></html>\n"
    )


def write() -> None:
    LIVE.mkdir(exist_ok=True)
    algorithms = [played(name, RANKS) for name in SHOWN]
    words = (
        f"All-reduce on {RANKS} ranks, turn by turn. Each rank begins with numbers of its own, a cell for each part of "
        "the tensor; a cell is full when the numbers of all ranks are in it. Drag the slider or use the arrow keys."
    )
    (LIVE / "ring.html").write_text(
        page("All-reduce, turn by turn", words, "live_ring.js", algorithms), encoding="utf-8"
    )
    words = (
        f"Backward of {LAYERS} layers with {LAYER_MB:g} MiB of gradients each, {BACKWARD_MS:g} ms a layer, on two "
        f"ranks joined by {GB_PER_S:g} GB/s with {LATENCY_MS:g} ms for each message. Buckets are filled from the last "
        "layer on, and sent when they are full."
    )
    caps = [overlap(cap) for cap in (0, 8, 12, 16, 24, 32, 48, 96)]
    (LIVE / "overlap.html").write_text(page("Buckets and overlap", words, "live_overlap.js", caps), encoding="utf-8")
    words = (
        "Llama 2 7B in bf16 with AdamW, one sequence of 4,096 tokens on each rank, recomputed: what a rank holds, by "
        "the planner (lockstep plan llama2-7b). The line is a GPU with 80 GB."
    )
    (LIVE / "zero.html").write_text(page("What ZeRO saves", words, "live_zero.js", memory_by_stage()), encoding="utf-8")
    words = (
        f"{RANKS} ranks, {EXPERTS} experts, {ACTIVE} of them active for each token: a forward pass of a mixture of "
        "experts under expert parallelism, step by step. A color is an expert; a row that is outlined comes from "
        "another rank. Drag the slider or use the arrow keys."
    )
    routers = [exchanges(name) for name in ROUTERS]
    (LIVE / "experts.html").write_text(
        page("Tokens sent to their experts", words, "live_experts.js", routers), encoding="utf-8"
    )
    pictures = {}
    for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1"):
        chunks = 2 if name == "interleaved" else 1
        schedule = pipeline_schedule(name, 4, 8, chunks)
        pictures[name] = timetable(schedule, placement_of(name, 4, chunks), Costs())
    write_page("Pipeline schedules", "4 stages, 8 micro-batches, backward twice as long as forward.", pictures,
               LIVE / "schedules.html")  # fmt: skip


if __name__ == "__main__":
    write()
