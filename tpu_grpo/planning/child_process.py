"""Runs a plan in a child process, because a compilation can kill its process without a message.

libtpu aborts if one of its checks fails, a compilation may run out of memory, and it cannot be interrupted.

code = run_in_child()      # before jax is imported
if code is not None:
    return code            # in the parent, once the child has ended
...                        # in the child
"""

import os
import signal
import sys
from typing import Any

from tpu_grpo.records.errors import PlanningError, say

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILLED = (
    "a plan must have the memory that compiling takes, 8 to 22 GiB for a whole one, but was killed in what is named "
    "last above, most likely because memory ran out; use --fast, or a machine with more memory"
)
ABORTED = (
    "libtpu must compile the programs of this config, but ended its process by {name} in what is named last above; its "
    "own words say where; change what they point to (mesh, attention, micro-batch, kernel settings), and report it"
)


def run_in_child() -> int | None:
    """Fork: return None in the child at once, and in the parent, when the child has ended, its exit code.

    SIGINT, SIGTERM and SIGHUP end both immediately, because a plan has nothing to save.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the parent kills the child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        return None
    asked: list[int] = []

    def kill_child(number: int, frame: Any) -> None:
        del frame
        asked.append(number)
        os.kill(child, signal.SIGKILL)

    previous = {number: signal.signal(number, kill_child) for number in ENDING}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if asked:
        print("interrupted; what was compiled is kept", file=sys.stderr)
    else:
        name = signal.Signals(-code).name
        say(PlanningError(KILLED if name == "SIGKILL" else ABORTED.format(name=name)))
    return PlanningError.exit_code
