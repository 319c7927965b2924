"""The faults: what each does, what the message must name, and what must result.

Some are done to a run from outside (a signal, a damaged file); the others are done by a rank to itself, in the midst of
a step or of a save (`inside.py`), because no process outside could hit that moment.
"""

import signal
from dataclasses import dataclass
from typing import Literal

After = Literal["restarted", "resumed", "goes on", "ends"]
"""All ranks are started anew by their launcher; a new command goes on; nothing is lost; the run ends, as it must."""


@dataclass(frozen=True)
class Fault:
    """One way for a run to go wrong."""

    name: str
    what: str
    named: str
    """What the output must say of it: a regular expression."""
    after: After = "restarted"
    inside: bool = False
    """A rank does it to itself."""
    signal: int = 0
    """Sent to a rank, or to the launcher."""
    hangs: bool = False
    """Ranks wait until --timeout: it is named that much later."""
    equal: bool = True
    """The weights at the end are those of an undisturbed run; else a step was left out on purpose."""
    nodes: bool = False
    """Of two nodes, which torchrun has started."""
    damage: str = ""
    """To the newest checkpoint, when the rank has been killed."""
    reported: str = ""
    """What the run that goes on must say."""


KILLED = r"rank \d failed first \(exit code -9\): it was ended by SIGKILL"
PASSED_OVER = "damaged, passed over"
SAVING = ("folder made", "files written", "manifest written", "renamed", "pointed to")
"""The moments of a save at which a kill may hit."""

ALL: tuple[Fault, ...] = (
    Fault("kill-rank", "kill -9 of a rank", KILLED, signal=signal.SIGKILL),
    Fault("kill-launcher", "kill -9 of the launcher", "", after="resumed", signal=signal.SIGKILL),
    Fault("kill-agent", "kill -9 of a node's agent; another node takes its place", r"\[rank 0\] error: ", nodes=True),
    Fault(
        "partition",
        "the link between two nodes is cut; both are started anew",
        "the ranks hung: ",
        after="resumed",
        hangs=True,
        nodes=True,
    ),
    Fault("stop-rank", "SIGSTOP of a rank", r"rank \d did not answer: process \d+", signal=signal.SIGSTOP, hangs=True),
    Fault("raise", "a rank raises", r"rank \d failed first.*a fault of chaos", inside=True),
    Fault("exit", "a rank leaves with exit status 0", r"rank \d left with sys.exit\(0\)", inside=True),
    Fault(
        "wrong-collective",
        "a rank calls another collective than the others",
        r"ranks disagree: rank|ranks hung: rank|connection",
        inside=True,
    ),
    Fault("slow-rank", "a rank is 50 ms slower in each step", r"rank \d is a straggler", after="goes on", inside=True),
    Fault("nan", "a NaN in one rank's batch", r"not finite, skipped", after="goes on", inside=True, equal=False),
    Fault("full-disk", "no space left while saving", r"was not saved: .*No space left", after="goes on", inside=True),
    *(
        Fault(f"save-{i}", f"kill -9 while saving: {moment}", KILLED, inside=True)
        for i, moment in enumerate(SAVING, start=1)
    ),
    *(
        Fault(name, what, KILLED, signal=signal.SIGKILL, damage=how, reported=PASSED_OVER)
        for name, what, how in (
            ("truncated", "the newest checkpoint cut short", "cut"),
            ("flipped", "one bit of it flipped", "flip"),
            ("missing", "one file of it removed", "remove"),
            ("swapped", "two files of it swapped", "swap"),
        )
    ),
    Fault("taken-port", "the port of the rendezvous is taken", r"port \d+ is taken", after="ends"),
)
FIRST_RANK = ("save-1", "save-3", "save-4", "save-5")
"""What the first rank alone does."""
BY_NAME = {fault.name: fault for fault in ALL}
