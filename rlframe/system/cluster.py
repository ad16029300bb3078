"""The Ray cluster of a run: one that is there, one of this machine, or one of pretended nodes; keys ray.*."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import chz
import psutil

from rlframe.core.config import count, number, option
from rlframe.core.errors import ConfigError, one_line
from rlframe.system.machine import n_cpus

_GB = 1e9
_KNOCK_S = 5.0
_LOOK_S = 2.0  # between looks at the processes of Ray
_watching: list[Any] = []  # the process that does, and our end of its line


@chz.chz
class RayOptions:
    """Where the actors of sampler=ray and replay=ray run."""

    address: str = option("", "auto or host:port of a running cluster; default: one of this machine, for this process")
    num_cpus: int = count(0, "of this machine's cluster; 0: its cores", low=0)
    num_gpus: int = count(0, "of this machine's cluster", low=0)
    object_store_gb: float = number(0.5, "shared memory of this machine's cluster", low=0.08)
    fake_nodes: int = count(0, "nodes that this machine pretends to be, of num_cpus each, to try a cluster; 0: one")


def imported() -> Any:
    """Ray; raises ConfigError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError('sampler=ray and replay=ray need ray: pip install "rlframe[ray]"') from None
    return ray


def connect(options: RayOptions) -> None:
    """Connect this process to the cluster, or start that of this machine; once.

    Raises:
        ConfigError: Ray is missing, there is no cluster at the address, or not so much memory for its objects.
    """
    ray = imported()
    if ray.is_initialized():
        return
    wanted, memory = options.object_store_gb * max(options.fake_nodes, 1), psutil.virtual_memory().total / _GB
    if not options.address and wanted > memory / 2:
        nodes = f" for each of ray.fake_nodes={options.fake_nodes}" * (options.fake_nodes > 1)
        raise ConfigError(
            f"ray.object_store_gb={options.object_store_gb:g}{nodes} is more than half of the {memory:.1f} GB of this "
            f"machine; lower it"
        )
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray will have it; it warns otherwise
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls to dead actors, which are replaced and told
    try:
        if options.address:
            _knock(options.address)
            ray.init(options.address, log_to_driver=False, logging_level=logging.ERROR)
            return
        n = options.num_cpus or n_cpus()
        each: dict[str, Any] = {
            "num_cpus": n,
            "num_gpus": options.num_gpus,
            "object_store_memory": int(options.object_store_gb * _GB),
        }
        if options.fake_nodes:
            from ray.cluster_utils import Cluster

            cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
            for _ in range(options.fake_nodes - 1):
                cluster.add_node(**each)
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init("local", **each, **quiet)  # also where another run has one
        _watch()
    except (OSError, RuntimeError, ValueError) as error:
        where = options.address or "this machine"
        raise ConfigError(f"no Ray cluster at ray.address={where}: {one_line(error)}") from error


def _knock(address: str) -> None:
    """Raise OSError or ValueError unless something answers at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "//" not in address:
        socket.create_connection((host, int(port)), _KNOCK_S).close()


def _watch() -> None:
    """Start a process that ends the cluster of this machine if this process is killed; some of Ray's would stay."""
    line, mine = os.pipe()
    family = [os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))]
    command = [sys.executable, "-c", f"from rlframe.system.cluster import end_with; end_with({family})"]
    no = subprocess.DEVNULL
    _watching.append(subprocess.Popen(command, stdin=line, stdout=no, stderr=no, start_new_session=True))
    os.close(line)
    _watching.append(mine)  # closes when we end


def end_with(family: Sequence[int]) -> None:
    """Wait until standard input ends, as the first of these processes does, and then kill what they had of Ray."""
    found: dict[int, psutil.Process] = {}
    for pid in family:
        with suppress(psutil.Error):
            found[pid] = psutil.Process(pid)
    owner, wait_s = found.get(family[0]), 0.0
    while owner and not select.select([0], [], [], wait_s)[0]:
        found |= _below(owner)
        wait_s = min(2 * wait_s + 0.25, _LOOK_S)  # its processes start one another in the first seconds
    for process in list(found.values()):
        found |= _below(process)
    time.sleep(_LOOK_S)  # most end by themselves
    for process in found.values():
        with suppress(psutil.Error):
            if process.is_running() and "ray" in " ".join(process.cmdline()[:2]):
                process.kill()


def _below(process: psutil.Process) -> dict[int, psutil.Process]:
    """Its children and theirs, by process id; none if it has ended."""
    with suppress(psutil.Error):
        return {each.pid: each for each in process.children(recursive=True)}
    return {}


def check_room(n_actors: int, cpus: float, setting: str) -> None:
    """Raise ConfigError if there is no cluster, or it cannot hold so many actors with so many CPUs each."""
    if not imported().is_initialized():
        raise ConfigError(f"{setting} needs a Ray cluster: call rlframe.system.cluster.connect(RayOptions()) before")
    available = imported().cluster_resources().get("CPU", 0.0)
    if n_actors * cpus > available:
        raise ConfigError(
            f"{setting} wants {n_actors * cpus:g} CPUs of the Ray cluster, which has {available:g} (those that this "
            f"process may use, unless ray.num_cpus says more); lower it, or raise ray.num_cpus"
        )
