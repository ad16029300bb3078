"""Ranks over torch.distributed: how processes find each other, what they exchange, and what ends them. Knows no RL.

On one machine, rank 0 is the process that the user started and the others are children of it. Under torchrun, or
whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, every rank is a program of its own.
"""

from __future__ import annotations

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
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # which it exports all the same
from torch.utils import _pytree as pytree

from rlframe.core.errors import ConfigError, Interrupted
from rlframe.core.ranks import Alone, RankLost, Ranks, as_current
from rlframe.system.process import Child, ChildDied
from rlframe.system.worker_main import NOTES, Parent

TIMEOUT_S = 600.0  # for all ranks to come to an exchange, unless told otherwise
_START_S = 120.0  # for a rank's process to load torch
_CAUSE_S = 5.0  # for the operating system, or the rank itself, to say why it is gone
_GRACE_S = 10.0  # for rank 0 to notice by itself that another is gone
_END_S = 30.0  # for the other ranks to end in order after rank 0 is done
_LOOK_S = 0.2
_LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")
_T = TypeVar("_T")

_log = logging.getLogger("rlframe")
_children: ContextVar[Sequence[Child]] = ContextVar("rlframe_children")  # the other ranks, where they are ours


@dataclass(frozen=True)
class Place:
    """Which rank a process is to be, and where the others are to be met."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_world_size: int = 1
    port: int = 0  # of rank 0's store on this machine; 0: the environment says where to meet
    job: str = ""  # torchrun's name for what it starts, and perhaps restarts
    max_restarts: int = 0  # by torchrun


def place_from_environment() -> Place:
    """The rank that torchrun, or a launcher like it, wants this process to be; the only one, if there is none.

    Raises:
        ConfigError: the variables are not numbers.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return Place()
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    on_one_machine = "LOCAL_RANK" not in os.environ
    return Place(
        rank,
        world_size,
        rank if on_one_machine else _number("LOCAL_RANK"),
        _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else world_size,
        job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        max_restarts=_number("TORCHELASTIC_MAX_RESTARTS") if "TORCHELASTIC_MAX_RESTARTS" in os.environ else 0,
    )


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"the environment variable {name}={os.environ[name]!r} is not a number") from None


class Group(Ranks):
    """Ranks of torch.distributed's process group: Gloo for what is on the CPU, NCCL between GPUs of their own."""

    def __init__(self, place: Place, timeout_s: float, on_gpus: bool) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self._timeout_s, self._on_gpus = timeout_s, on_gpus
        self._peers: list[tuple[str, int]] = []  # host and process id
        self._peers = self.gather((socket.gethostname(), os.getpid()))

    def sum(self, number: int) -> int:
        return self._number(number, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        return self._number(number, dist.ReduceOp.MAX)

    def _number(self, number: int, operation: Any) -> int:
        tensor = torch.tensor([number], dtype=torch.int64)
        with self._together():
            dist.all_reduce(tensor, operation)
        return int(tensor)

    def total(self, tensor: Tensor) -> Tensor:
        return self._added_up(tensor.detach().clone())

    def _added_up(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place where the tensor can travel from there."""
        carried = tensor if self._on_gpus else tensor.to(_CPU)
        with self._together():
            dist.all_reduce(carried)
        return carried.to(tensor.device)

    def stack(self, tensor: Tensor) -> Tensor:
        carried = tensor.detach().contiguous() if self._on_gpus else tensor.detach().to(_CPU).contiguous()
        found = [torch.empty_like(carried) for _ in range(self.world_size)]
        with self._together():
            dist.all_gather(found, carried)
        return torch.stack(found).to(tensor.device)

    def average(self, tensors: Sequence[Tensor], weight: Tensor | float = 1.0) -> None:
        """In one exchange: the tensors and the weight make one bucket."""
        if not tensors:
            return
        one = torch.ones(1, dtype=tensors[0].dtype, device=tensors[0].device)
        bucket = self._added_up(torch.cat([*(t.detach().reshape(-1) for t in tensors), one]) * weight)
        weights = bucket[-1]
        bucket /= torch.where(weights > 0, weights, 1.0)
        pieces = bucket[:-1].split([t.numel() for t in tensors])
        torch._foreach_copy_(list(tensors), [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])

    def gather(self, value: _T) -> list[_T]:
        found: list[Any] = [None] * self.world_size
        with self._together():
            dist.all_gather_object(found, _on_cpu(value))
        return found

    def broadcast(self, value: _T) -> _T:
        found = [_on_cpu(value)]
        with self._together():
            dist.broadcast_object_list(found, src=0, device=_CPU)
        return found[0]

    def pass_on(self, signum: int) -> None:
        for child in _children.get(()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signum)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            _blame_children()
            raise RankLost(self._loss(error)) from error

    def _loss(self, error: RuntimeError) -> str:
        """Who is gone, as far as can be known from this machine."""
        deadline = time.monotonic() + _CAUSE_S
        gone: list[str] = []
        while not gone and self._peers and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 10)
            gone = [
                f"rank {rank} (process {pid}) is gone"
                for rank, (host, pid) in enumerate(self._peers)
                if host == socket.gethostname() and not _is_running(pid)
            ]
        what = " and ".join(gone) or (
            f"another rank is gone, out of reach, or did not come within {self._timeout_s:g} s ({_first_line(error)})"
        )
        return f"{what}; rank {self.rank} cannot go on without it"


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
def join(place: Place, timeout_s: float = TIMEOUT_S, device: torch.device = _CPU) -> Iterator[Ranks]:
    """Meet the other ranks; inside, they are the current ones (see core.ranks).

    Args:
        timeout_s: for the others to come, here and to every later exchange.
        device: where this rank learns; a GPU is its own.
    Raises:
        RankLost: the others do not come.
    """
    if place.world_size == 1:
        yield Alone()
        return
    on_gpus = device.type == "cuda" and dist.is_nccl_available()
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _meet(place, _store(place, timeout), timeout_s)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except RuntimeError as error:
        _blame_children()
        raise RankLost(f"rank {place.rank} could not meet the other ranks: {_first_line(error)}") from error
    try:
        ranks = Group(place, timeout_s, on_gpus)
        with as_current(ranks):
            yield ranks
        # Nobody ends while another still has a connection to it. All is done by now, so who is gone already is no loss.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _store(place: Place, timeout: timedelta) -> TCPStore:
    """Where ranks leave word for each other."""
    if place.port:
        return TCPStore(_LOOPBACK, place.port, is_master=False, timeout=timeout)
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    return TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timeout)


def _meet(place: Place, store: TCPStore, timeout_s: float) -> PrefixStore:
    """Wait until all ranks are here; a part of the store for this meeting alone.

    Torchrun keeps one store for all its restarts, with the addresses in it that dead ranks have left. So rank 0 gives
    each meeting a new name, and who answers to an old one is not heard.
    """
    deadline = time.monotonic() + timeout_s
    here, welcome = "{}/rank {} is here", "{}/rank {} is welcome"
    if place.rank == 0:
        meeting = uuid.uuid4().hex
        store.set("meeting", meeting)
        for rank in range(1, place.world_size):
            while not store.check([here.format(meeting, rank)]):
                _rest(deadline, f"rank {rank} did not come within {timeout_s:g} s")
            store.set(welcome.format(meeting, rank), store.get(here.format(meeting, rank)).decode())
        return PrefixStore(meeting, store)
    me = uuid.uuid4().hex
    while True:
        meeting = store.get("meeting").decode()
        store.set(here.format(meeting, place.rank), me)
        answer = welcome.format(meeting, place.rank)
        if store.check([answer]) and store.get(answer).decode() == me:
            return PrefixStore(meeting, store)
        _rest(deadline, f"rank 0 did not come within {timeout_s:g} s")


def _rest(deadline: float, otherwise: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(otherwise)
    time.sleep(_LOOK_S / 10)


def in_ranks(work: Callable[[Place], _T], world_size: int) -> _T:
    """Run `work` as every rank: here as rank 0, and as the others in child processes that end with this one.

    Where torchrun has started this process, here as the rank that it is. `work` must be picklable, and `join`s itself.

    Returns:
        What it returned here.
    Raises:
        ConfigError: torchrun started another number of ranks.    RankLost: another rank died.
        What `work` raised, here or, as far as it is the cause, as another rank.
    """
    place = place_from_environment()
    if place.world_size > 1 or world_size == 1:
        return work(place)
    # The port is the system's choice, and known before any other process asks for it: jobs side by side never clash.
    with socket.create_server((_LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
        store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )
    places = [Place(rank, world_size, rank, world_size, port) for rank in range(world_size)]
    children: list[Child] = []
    token = _children.set(children)
    try:
        children.extend(Child(f"rank {at.rank}", _as_rank, (work, at), method="spawn") for at in places[1:])
        for child in children:
            child.receive(_START_S)
        with _watch(children):
            result = work(places[0])
        _end(children, _END_S)
        return result
    except ChildDied as death:
        raise RankLost(f"a rank did not start: it {death}") from None
    finally:
        _children.reset(token)
        _end(children, 0.0)
        del store


def _as_rank(parent: Parent, work: Callable[[Place], Any], place: Place) -> None:
    """The life of a rank's child process."""
    parent.send(None)  # torch is loaded
    try:
        work(place)
    except Interrupted as stop:
        _log.debug(str(stop))  # rank 0 tells
    parent.words[NOTES] = 1  # it ends in order


def _end(children: Sequence[Child], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for child in children:
        child.close(max(0.0, deadline - time.monotonic()))


def _blame_children() -> None:
    """Raise what ended another rank: its own error or its death, rather than that it missed a third one.

    Nothing, where the other ranks are not children of this process.
    """
    children, missed = _children.get(()), list[RankLost]()
    deadline = time.monotonic() + _CAUSE_S
    while children and time.monotonic() < deadline and len(missed) < len(children):
        for child in children:
            try:
                child.check(0.0, float("inf"))
            except ChildDied as death:
                raise RankLost(f"{child.name} (process {child.pid}) {death}; the others cannot go on") from None
            except RankLost as error:
                missed.append(error)
            except Exception as error:
                _log.error(f"{child.name} (process {child.pid}) failed, and with it the run: {error}")
                raise
        time.sleep(_LOOK_S)


@contextmanager
def _watch(children: Sequence[Child]) -> Iterator[None]:
    """End this process if a child dies and the work inside does not notice: it may wait for it on a GPU, for ever."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            for child in children:
                if not _is_running(child.pid) and not child.n_notes and not done.wait(_GRACE_S):
                    _die(child)

    thread = threading.Thread(target=watch, name="ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _die(child: Child) -> None:
    """At once, in the middle of whatever holds the main thread; the kernel ends our children with us."""
    what = f"{child.name} (process {child.pid}) is gone, and rank 0 hangs without it; the last snapshot is kept"
    _log.error(what)
    print(f"error: {what}", file=sys.stderr, flush=True)
    os._exit(RankLost.exit_status)
