"""Become a rank's program: with its logs in files, and dying with the process that launched it.

    python -S -E _guard.py FOLDER PARENT PROGRAM [ARGUMENT ...]

Standard error goes to ``FOLDER/rank<RANK>.stderr``, and standard output, but for rank 0, beside it. On Linux
the kernel is asked for SIGKILL at the death of the parent (process id PARENT). Then this process replaces
itself by PROGRAM, which keeps all that. It is run by path and imports only what is cheap, so that it takes
some ten milliseconds: a worker is guarded long before it has imported torch.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Redirect, set the death signal, look whether the parent has died meanwhile, go over to the program."""
    folder, parent, *command = sys.argv[1:]
    rank = int(os.environ["RANK"])
    _redirect(2, f"{folder}/rank{rank}.stderr")
    if rank > 0:
        _redirect(1, f"{folder}/rank{rank}.stdout")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the launching process died before this worker began")
    os.execv(command[0], command)


def _redirect(descriptor: int, path: str) -> None:
    # Appending: the processes a rank starts write to the same file.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, descriptor)
    os.close(file)


if __name__ == "__main__":
    main()
