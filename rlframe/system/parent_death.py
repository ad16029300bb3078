"""Ending when whoever started us ends, by the kernel's hand; and a program that puts a command on such a leash.

    python leash.py FD CPUS COMMAND...

becomes COMMAND, pinned to CPUS (0,1; - for none), which dies with all of its process group when the pipe FD loses its
last writer. The program needs the standard library alone and is run by its path, so it takes about 15 ms. The leash
survives exec, and also holds work that never gives the interpreter back.
"""

import fcntl
import os
import select
import signal
import sys

QUEUE_CPUS = "RLFRAME_CPUS"  # environment variable of a queued run: the CPUs that its affinity code speaks of


def die_with_writer(fd: int) -> None:
    """SIGKILL to our process group once nobody can write into the pipe any more. Linux alone knows this.

    PR_SET_PDEATHSIG would speak of the thread that started us, or of a server of forks, and to this process only.
    """
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _main(line: str, cpus: str, *command: str) -> None:
    die_with_writer(int(line))
    if select.select([int(line)], [], [], 0)[0]:
        sys.exit("whoever started us was gone before we knew")
    os.set_inheritable(int(line), True)  # the leash lasts as long as the pipe is open here
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
