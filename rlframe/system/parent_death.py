"""Kill this process when its parent dies (Linux). As a program, it starts a command that is killed in the same way.

    python parent_death.py FD CPUS COMMAND...

runs COMMAND, pinned to CPUS (0,1; - for none), and kills its process group when the pipe FD loses its last writer. It
uses the standard library only and is run by its path, so it starts fast. The effect survives exec, and also
kills work that never releases the interpreter.
"""

import fcntl
import os
import select
import signal
import sys

QUEUE_CPUS = "RLFRAME_CPUS"  # environment variable of a queued run: CPUs that it may use


def die_with_writer(fd: int) -> None:
    """Send SIGKILL to our process group when the pipe `fd` has no writer any more. Linux only.

    PR_SET_PDEATHSIG would follow the thread that started us, or the fork server, and kill this process only.
    """
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _main(fd: str, cpus: str, *command: str) -> None:
    die_with_writer(int(fd))
    if select.select([int(fd)], [], [], 0)[0]:
        sys.exit("the parent process has ended")
    os.set_inheritable(int(fd), True)  # the effect lasts while the pipe is open here
    if sys.platform == "linux" and cpus != "-":
        try:
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
        except OSError as error:
            print(f"warning: not pinned to CPUs {cpus}: {error}", file=sys.stderr, flush=True)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
