"""What the first failing rank had to say, for the person at the keyboard."""

import signal

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lockstep.errors import RankError, UserError


def explain(error: ChildFailedError) -> Exception:
    """The first failure: what the rank raised, if that says all there is to say, else with its traceback."""
    rank, failure = error.get_first_failure()
    text = _failure_text(failure)
    callstack = ""
    if isinstance(failure.error_file_data, dict):
        details = failure.error_file_data.get("message", {})
        if isinstance(details, dict):
            callstack = details.get("extraInfo", {}).get("py_callstack", "")
    kind, _, message = text.partition(": ")
    known_type: type[Exception] | None = {
        "UserError": UserError,
        "DamagedError": UserError,
        "RankError": RankError,
        "HangError": RankError,
    }.get(kind)
    if known_type is not None:
        known = known_type(message)
        known.__cause__ = RankError(f"on rank {rank}:\n{callstack}") if callstack else None  # --debug shows it
        return known
    return RankError(f"rank {rank} failed first (exit code {failure.exitcode}): {text}\n{callstack}".rstrip())


def said_something(error: ChildFailedError) -> bool:
    """Whether the first failing rank raised something, rather than being ended by a signal."""
    _, failure = error.get_first_failure()
    return failure.exitcode >= 0


def _failure_text(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return ended_by(failure.exitcode)
    message = failure.message
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)


def ended_by(exit_code: int) -> str:
    """A process that has raised nothing."""
    if exit_code < 0:
        return f"it was ended by {signal.Signals(-exit_code).name}"
    return f"it has ended with exit status {exit_code}"
