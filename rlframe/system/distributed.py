"""Ranks: starting them, connecting them, and what happens when one dies.

On one machine, rank 0 is the user's process and the others are its children. Under torchrun, or another launcher that
sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, every rank is a separate program.
"""

import contextlib
import logging
import math
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__

from rlframe.core.errors import ConfigError, Interrupted, describe
from rlframe.core.ranks import RankLost, Ranks, SingleRank, use_ranks
from rlframe.system.collectives import TorchRanks, first_line, is_running
from rlframe.system.process import ChildDied, ChildProcess, close_all
from rlframe.system.shared_ranks import RankMemory, SharedRanks
from rlframe.system.worker_main import N_EVENTS, ParentLink

TIMEOUT_S = 600.0  # default deadline of a collective operation
_START_S = 120.0  # for a rank's process to import torch
_GRACE_S = 10.0  # for rank 0 to notice a dead rank by itself
_END_S = 30.0  # for the other ranks to exit after rank 0 is done
_POLL_S = 0.2
_CPU = torch.device("cpu")
_T = TypeVar("_T")

_log = logging.getLogger("rlframe")


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process and the address where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_world_size: int = 1
    folder: str = ""  # private to the ranks that rank 0 has started; empty: see MASTER_ADDR and MASTER_PORT
    memory: Sequence[RankMemory] = field(default=(), repr=False)  # of those ranks
    children: Sequence[ChildProcess] = field(default=(), repr=False)  # those that this process has started
    n_samplers: int = 0  # ranks with environments (see Ranks); 0: all
    job: str = ""  # torchrun's id of the job, equal after its restarts
    max_restarts: int = 0  # of torchrun


def rank_from_environment() -> RankInfo:
    """The rank that torchrun or a similar launcher has set in the environment; a single rank without one."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return RankInfo()
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    return RankInfo(
        rank,
        world_size,
        _number("LOCAL_RANK", rank),
        _number("LOCAL_WORLD_SIZE", world_size),
        job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        max_restarts=_number("TORCHELASTIC_MAX_RESTARTS"),
    )


def _number(name: str, default: int = 0) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise ConfigError(f"the environment variable {name}={os.environ[name]!r} is not a number") from None


@contextmanager
def join(info: RankInfo, timeout_s: float = TIMEOUT_S, device: torch.device = _CPU) -> Iterator[Ranks]:
    """Connect to the other ranks and make them current (see core.ranks) within the block.

    Args:
        timeout_s: deadline of this and every later collective operation; RankLost if a rank does not connect in time.
        device: where this rank learns; each rank has its own GPU.
    """
    if info.world_size == 1:
        yield SingleRank()
        return
    on_gpus = device.type == "cuda" and dist.is_nccl_available()
    if on_gpus:
        torch.cuda.set_device(device)
    try:
        ranks = _connect(info, timeout_s, on_gpus)
        with use_ranks(ranks):
            yield ranks
        # No rank may exit while another is still connected to it. The work is done, so errors no longer matter.
        with contextlib.suppress(RankLost):
            ranks.sum(0)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(info: RankInfo, timeout_s: float, on_gpus: bool) -> Ranks:
    timeout = timedelta(seconds=timeout_s)
    init = partial(dist.init_process_group, rank=info.rank, world_size=info.world_size, timeout=timeout)
    try:
        if info.memory:
            if on_gpus:
                init("nccl", store=FileStore(f"{info.folder}/store", info.world_size))
            place, n_samplers = (info.rank, info.world_size), info.n_samplers or info.world_size
            check, pids = partial(_check, info.children), [child.pid for child in info.children]
            shared = SharedRanks(*place, info.memory[0], timeout_s, check, pids, n_samplers, on_gpus)
            shared.sum(0)  # all are here
            return shared
        store = _meet(info, _store(timeout), timeout_s)
        init("cpu:gloo,cuda:nccl" if on_gpus else "gloo", store=store)
    except RuntimeError as error:
        why = first_line(error)
        if "EADDRINUSE" in why:
            why = f"port {os.environ['MASTER_PORT']} is taken (MASTER_PORT), perhaps by another run; choose a free one"
        raise RankLost(f"rank {info.rank} could not connect to the other ranks: {why}") from error
    return TorchRanks(info.rank, info.world_size, timeout_s, on_gpus)


def _store(timeout: timedelta) -> TCPStore:
    """The store of torchrun, or of another launcher, which every user who reaches its port can write to."""
    is_master = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _meet(info: RankInfo, store: TCPStore, timeout_s: float) -> PrefixStore:
    """Wait until all ranks are connected; returns a part of the store for this meeting only.

    Torchrun keeps one store over its restarts, with addresses of dead ranks. So rank 0 gives each meeting a new name,
    and answers to an older one are ignored.
    """
    deadline = time.monotonic() + timeout_s
    here, welcome = "{}/rank {} is here", "{}/rank {} is welcome"
    if info.rank == 0:
        meeting = uuid.uuid4().hex
        store.set("meeting", meeting)
        for rank in range(1, info.world_size):
            while not store.check([here.format(meeting, rank)]):
                _poll(deadline, f"rank {rank} did not connect within {timeout_s:g} s")
            store.set(welcome.format(meeting, rank), store.get(here.format(meeting, rank)).decode())
        return PrefixStore(meeting, store)
    me = uuid.uuid4().hex
    while True:
        meeting = store.get("meeting").decode()
        store.set(here.format(meeting, info.rank), me)
        answer = welcome.format(meeting, info.rank)
        if store.check([answer]) and store.get(answer).decode() == me:
            return PrefixStore(meeting, store)
        _poll(deadline, f"rank 0 did not connect within {timeout_s:g} s")


def _poll(deadline: float, otherwise: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(otherwise)
    time.sleep(_POLL_S / 10)


def launch_ranks(work: Callable[[RankInfo], _T], world_size: int, n_samplers: int = 0) -> _T:
    """Run `work` on every rank: as rank 0 in this process, and as the others in child processes.

    Under torchrun, only run it here, as this process's rank. `work` must be picklable and calls `join` itself. Returns
    the result of this process's rank. `n_samplers`: see RankInfo. Raises RankLost if another rank died, or the
    exception of `work` on any rank.
    """
    info = rank_from_environment()
    if info.world_size > 1 or world_size == 1:
        return work(info)
    children: list[ChildProcess] = []
    memory = RankMemory.make(world_size)
    with tempfile.TemporaryDirectory(prefix="rlframe-ranks-") as folder:  # only its owner can enter
        infos = [
            RankInfo(rank, world_size, rank, world_size, folder, n_samplers=n_samplers) for rank in range(world_size)
        ]
        try:
            for each in infos[1:]:
                children.append(ChildProcess(f"rank {each.rank}", _as_rank, (work, each), method="spawn"))
                memory.send(children[-1])
            for child in children:
                child.receive(_START_S)
            with _watch(children):
                result = work(replace(infos[0], memory=[memory], children=children))
            close_all(children, _END_S)
            return result
        except ChildDied as death:
            raise RankLost(f"a rank failed to start: it {death}") from None
        finally:
            close_all(children, 0.0)
            memory.close()


def _as_rank(parent: ParentLink, work: Callable[[RankInfo], Any], info: RankInfo) -> None:
    memory = RankMemory(parent.receive_memory(), parent.receive_memory())
    parent.send(None)  # torch is imported
    try:
        work(replace(info, memory=[memory]))
    except Interrupted as stop:
        _log.debug(str(stop))  # rank 0 reports it
    parent.control[N_EVENTS] = 1  # it exits normally


def _check(children: Sequence[ChildProcess]) -> None:
    """Raise the exception of a rank that is our child and has failed, or RankLost if it has died."""
    for child in children:
        try:
            child.check(0.0, float("inf"))
        except ChildDied as death:
            raise RankLost(f"{child.name} (process {child.pid}) {death}; the others cannot continue") from None
        except Exception as error:
            _log.error(f"{child.name} (process {child.pid}) failed and ended the run: {error}")
            raise


def _why_it_ended(child: ChildProcess) -> str:
    try:
        child.check(0.0, math.inf)
    except ChildDied as death:
        return str(death)
    except Exception as error:
        return f"failed: {describe(error)}"
    return "ended"


@contextmanager
def _watch(children: Sequence[ChildProcess]) -> Iterator[None]:
    """Exit at once if a child ends and the work inside does not notice, as it waits on a GPU or is busy."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            for child in children:
                if not is_running(child.pid) and not child.n_events and not done.wait(_GRACE_S):
                    what = f"{child.name} (process {child.pid}) {_why_it_ended(child)}; resume from the last snapshot"
                    _log.error(what)
                    print(f"error: {what}", file=sys.stderr, flush=True)
                    os._exit(RankLost.exit_status)  # the kernel then kills our children

    thread = threading.Thread(target=watch, name="ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
