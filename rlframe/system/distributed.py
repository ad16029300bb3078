"""Ranks over torch.distributed: starting them, their collective operations, and what happens when one dies.

On one machine, rank 0 is the user's process and the others are its children. Under torchrun, or another launcher that
sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, every rank is a separate program.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__
from torch.utils import _pytree as pytree

from rlframe.core.errors import ConfigError, Interrupted
from rlframe.core.ranks import RankLost, Ranks, SingleRank, use_ranks
from rlframe.system.process import ChildDied, ChildProcess
from rlframe.system.worker_main import N_EVENTS, ParentLink

TIMEOUT_S = 600.0  # default deadline of a collective operation
_START_S = 120.0  # for a rank's process to import torch
_CAUSE_S = 5.0  # to find out why a rank died
_GRACE_S = 10.0  # for rank 0 to notice a dead rank by itself
_END_S = 30.0  # for the other ranks to exit after rank 0 is done
_POLL_S = 0.2
_LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")
_T = TypeVar("_T")

_log = logging.getLogger("rlframe")
_children: ContextVar[Sequence[ChildProcess]] = ContextVar("rlframe_children")  # other ranks that are our children


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process and the address where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_world_size: int = 1
    port: int = 0  # of rank 0's store on this machine; 0: see MASTER_ADDR and MASTER_PORT
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


class TorchRanks(Ranks):
    """Ranks of a torch.distributed process group: Gloo on the CPU, NCCL between GPUs."""

    def __init__(self, info: RankInfo, timeout_s: float, on_gpus: bool) -> None:
        self.rank, self.world_size = info.rank, info.world_size
        self._timeout_s, self._on_gpus = timeout_s, on_gpus
        self._peers: list[tuple[str, int]] = []  # host and process id
        self._peers = self.gather((socket.gethostname(), os.getpid()))

    def sum(self, number: int) -> int:
        return self._number(number, dist.ReduceOp.SUM)

    def max(self, number: int) -> int:
        return self._number(number, dist.ReduceOp.MAX)

    def _number(self, number: int, operation: Any) -> int:
        tensor = torch.tensor([number], dtype=torch.int64)
        with self._exchange():
            dist.all_reduce(tensor, operation)
        return int(tensor)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return self._all_reduce(tensor.detach().clone())

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place if the tensor's device supports it."""
        carried = tensor if self._on_gpus else tensor.to(_CPU)
        with self._exchange():
            dist.all_reduce(carried)
        return carried.to(tensor.device)

    def stack(self, tensor: Tensor) -> Tensor:
        carried = tensor.detach().contiguous() if self._on_gpus else tensor.detach().to(_CPU).contiguous()
        found = [torch.empty_like(carried) for _ in range(self.world_size)]
        with self._exchange():
            dist.all_gather(found, carried)
        return torch.stack(found).to(tensor.device)

    def average(self, tensors: Sequence[Tensor], weight: Tensor | float = 1.0) -> None:
        """One collective operation: tensors and weight are packed into one bucket."""
        if not tensors:
            return
        one = torch.ones(1, dtype=tensors[0].dtype, device=tensors[0].device)
        bucket = self._all_reduce(torch.cat([*(t.detach().reshape(-1) for t in tensors), one]) * weight)
        weights = bucket[-1]
        bucket /= torch.where(weights > 0, weights, 1.0)
        pieces = bucket[:-1].split([t.numel() for t in tensors])
        torch._foreach_copy_(list(tensors), [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])

    def gather(self, value: _T) -> list[_T]:
        found: list[Any] = [None] * self.world_size
        with self._exchange():
            dist.all_gather_object(found, _on_cpu(value))
        return found

    def broadcast(self, value: _T) -> _T:
        found = [_on_cpu(value)]
        with self._exchange():
            dist.broadcast_object_list(found, src=0, device=_CPU)
        return found[0]

    def forward_signal(self, signum: int) -> None:
        for child in _children.get(()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signum)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            _blame_children()
            raise RankLost(self._loss(error)) from error

    def _loss(self, error: RuntimeError) -> str:
        deadline = time.monotonic() + _CAUSE_S
        dead: list[str] = []
        while not dead and self._peers and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
            dead = [
                f"rank {rank} (process {pid}) has died"
                for rank, (host, pid) in enumerate(self._peers)
                if host == socket.gethostname() and not _is_running(pid)
            ]
        what = " and ".join(dead) or (
            f"another rank died, is unreachable, or exceeded {self._timeout_s:g} s ({_first_line(error)})"
        )
        return f"{what}; rank {self.rank} cannot continue"


def _on_cpu(value: _T) -> _T:
    return pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, value)


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _meet(info, _store(info, timeout), timeout_s)
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    except RuntimeError as error:
        _blame_children()
        raise RankLost(f"rank {info.rank} could not connect to the other ranks: {_first_line(error)}") from error
    try:
        ranks = TorchRanks(info, timeout_s, on_gpus)
        with use_ranks(ranks):
            yield ranks
        # No rank may exit while another is still connected to it. The work is done, so errors no longer matter.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _store(info: RankInfo, timeout: timedelta) -> TCPStore:
    if info.port:
        return TCPStore(_LOOPBACK, info.port, is_master=False, timeout=timeout)
    hosts = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun hosts the store
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    return TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timeout)


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


def launch_ranks(work: Callable[[RankInfo], _T], world_size: int) -> _T:
    """Run `work` on every rank: as rank 0 in this process, and as the others in child processes.

    Under torchrun, only run it here, as this process's rank. `work` must be picklable and calls `join` itself. Returns
    the result of this process's rank. Raises RankLost if another rank died, or the exception of `work` on any rank.
    """
    info = rank_from_environment()
    if info.world_size > 1 or world_size == 1:
        return work(info)
    # The system chooses a free port and we hold it, so concurrent jobs never collide.
    with socket.create_server((_LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
        store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )
    infos = [RankInfo(rank, world_size, rank, world_size, port) for rank in range(world_size)]
    children: list[ChildProcess] = []
    token = _children.set(children)
    try:
        children.extend(ChildProcess(f"rank {info.rank}", _as_rank, (work, info), method="spawn") for info in infos[1:])
        for child in children:
            child.receive(_START_S)
        with _watch(children):
            result = work(infos[0])
        _end(children, _END_S)
        return result
    except ChildDied as death:
        raise RankLost(f"a rank failed to start: it {death}") from None
    finally:
        _children.reset(token)
        _end(children, 0.0)
        del store


def _as_rank(parent: ParentLink, work: Callable[[RankInfo], Any], info: RankInfo) -> None:
    parent.send(None)  # torch is imported
    try:
        work(info)
    except Interrupted as stop:
        _log.debug(str(stop))  # rank 0 reports it
    parent.control[N_EVENTS] = 1  # it exits normally


def _end(children: Sequence[ChildProcess], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for child in children:
        child.close(max(0.0, deadline - time.monotonic()))


def _blame_children() -> None:
    """If another rank is our child, raise its exception or death, rather than that it missed a third rank."""
    children, missed = _children.get(()), list[RankLost]()
    deadline = time.monotonic() + _CAUSE_S
    while children and time.monotonic() < deadline and len(missed) < len(children):
        for child in children:
            try:
                child.check(0.0, float("inf"))
            except ChildDied as death:
                raise RankLost(f"{child.name} (process {child.pid}) {death}; the others cannot continue") from None
            except RankLost as error:
                missed.append(error)
            except Exception as error:
                _log.error(f"{child.name} (process {child.pid}) failed and ended the run: {error}")
                raise
        time.sleep(_POLL_S)


@contextmanager
def _watch(children: Sequence[ChildProcess]) -> Iterator[None]:
    """Exit at once if a child dies and the work inside does not notice, because it waits for the child on a GPU."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            for child in children:
                if not _is_running(child.pid) and not child.n_events and not done.wait(_GRACE_S):
                    what = f"{child.name} (process {child.pid}) has died while rank 0 waits for it"
                    _log.error(f"{what}; resume from the last snapshot")
                    print(f"error: {what}; resume from the last snapshot", file=sys.stderr, flush=True)
                    os._exit(RankLost.exit_status)  # the kernel then kills our children

    thread = threading.Thread(target=watch, name="ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
