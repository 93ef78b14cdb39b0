"""Run PySpark's worker daemon in our process group. It never outlives its starter.

PySpark puts its daemon into a process group of its own and ends its workers by a signal to that group. Ours stay in the
pipeline's group, so that one kill reaches everything, and the kernel ends a worker whose daemon is gone. `cluster.py`
has Spark start this daemon.
"""

from __future__ import annotations

import os
import signal
import sys

from pyspark import daemon

from tailrace.processes import die_with_parent


def main() -> None:
    """Run PySpark's daemon with its process-group handling replaced by ours."""
    if "pyspark.worker" in sys.argv:  # these run our tasks: load what they need once, before the fork
        import tailrace.tasks.apply
        import tailrace.tasks.load  # noqa: F401
    kill = os.kill

    def kill_one(pid: int, number: int) -> None:
        if pid != 0:  # 0 is the whole group: the kernel ends the workers instead, see below
            kill(pid, number)

    os.setpgid = lambda *_: None
    os.kill = kill_one
    # A worker would restore the handler that raises, but the pipeline answers Ctrl-C.
    signal.default_int_handler = signal.SIG_IGN  # type: ignore[assignment] # what `signal.signal` takes
    # Not for the daemon itself: the kernel would end it with the *thread* of the JVM that started it. The daemon
    # ends anyway when the JVM is gone and its input closes.
    os.register_at_fork(after_in_child=die_with_parent)
    daemon.manager()


if __name__ == "__main__":
    main()
