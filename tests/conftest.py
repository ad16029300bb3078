"""What holds for every test process and for those that it starts: one compute thread, and imports done once.

Networks in tests are tiny. With more threads, or threads that wait awake, processes on few cores wait for one another.
"""

import multiprocessing
import os
from pathlib import Path

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ |= {**_ONE_THREAD, "OMP_WAIT_POLICY": "PASSIVE"}  # read by libraries when they are loaded: before torch is
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))

import torch  # noqa: E402

torch.set_num_threads(1)

# All children of one test process are forked by one server, which imports once what any of them will need.
_PRELOAD = ("rlframe.system.worker_main", "rlframe.samplers.background_worker", "rlframe.experiment.build")
_set_preload = multiprocessing.set_forkserver_preload
_set_preload([*_PRELOAD])
multiprocessing.set_forkserver_preload = lambda modules: _set_preload([*modules, *_PRELOAD])
