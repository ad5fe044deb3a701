"""A pool of worker processes for distributed tests: started once, a fresh gloo group for every call.

    def check_sum(rank: int, size: int, factor: int) -> float:      # a module-level function
        value = torch.tensor(float(rank * factor))
        dist.all_reduce(value)
        return value.item()

    def test_sum(pool):
        assert pool.run(check_sum, 10, ranks=2) == [10.0, 10.0]

`run(function, *args, ranks=2, timeout=120)` calls `function(rank, size, *args)` on each rank inside an initialised
process group and returns the results by rank. Results and arguments travel by pickle: return plain data or CPU tensors.
A rank that raises fails the test with its traceback; it and the ranks that do not answer `grace` seconds later are
replaced.

A test all of whose body runs on each rank is one function, which takes `rank`, `size` and what it is parametrized by:

    @on_ranks(2)
    def test_sum(rank: int, size: int) -> None: ...

Workers are forked from a process that has imported what nearly all of them need and done nothing else: a fresh one
costs no imports. What is tested is not imported there, since that process may look for it elsewhere than the tests do.
"""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

IMPORTED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "pydantic",
    "transformers.models.llama.modeling_llama",
)
GRACE_S = 8.0  # for a failed rank's peers to fail by themselves
MOST_THREADS = 40
"""A worker with more is replaced: groups that something still holds wake their threads a hundred times a second."""


class RankFailure(AssertionError):
    """A rank raised; the message holds every failed rank's traceback."""


class Pool:
    """Worker processes that wait for functions to run as ranks of a group."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._stores = tempfile.TemporaryDirectory()
        self._calls = 0

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120, grace: float = GRACE_S
    ) -> list[Any]:
        """`function(rank, size, *args)` on `ranks` processes; the results by rank."""
        self._workers = [worker.replaced() if worker.is_worn else worker for worker in self._workers]
        while len(self._workers) < ranks:
            self._workers.append(_Worker())
        workers, self._calls = self._workers[:ranks], self._calls + 1
        store = os.path.join(self._stores.name, f"store{self._calls}")
        for rank, worker in enumerate(workers):
            worker.pipe.send((function, args, rank, ranks, store))
        results, failures = self._collect(workers, timeout, grace)
        if failures:
            raise RankFailure(
                "\n".join(f"--- rank {rank} of {ranks}\n{text}" for rank, text in sorted(failures.items()))
            )
        return [results[rank] for rank in range(ranks)]

    def _collect(self, workers: list[_Worker], timeout: float, grace: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(workers))
        while waiting:
            ready = wait([worker.pipe for worker in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank, worker in waiting.items():
                    failures.setdefault(rank, "did not answer in time: waiting for a peer, or stuck")
                    self._workers[self._workers.index(worker)] = worker.replaced()
                break
            for rank, worker in list(waiting.items()):
                if worker.pipe in ready:
                    del waiting[rank]
                    ok, value = worker.answer()
                    if ok:
                        results[rank] = value
                    else:
                        failures[rank] = value
                        deadline = min(deadline, time.monotonic() + grace)
                        # What it leaves behind (a group half made, say) is not the next test's concern.
                        self._workers[self._workers.index(worker)] = worker.replaced()
        return results, failures

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._stores.cleanup()


class _Worker:
    def __init__(self) -> None:
        # Else an import that asks whether there is a GPU keeps what is forked from using it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(list(IMPORTED))
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def is_worn(self) -> bool:
        """Whether calls have left more threads behind than it is worth to keep."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task")) > MOST_THREADS
        except FileNotFoundError:  # no Linux, or it has ended, which its next call tells
            return False

    def answer(self) -> tuple[bool, Any]:
        try:
            ok, value = self.pipe.recv()
        except EOFError:
            self.process.join(1)
            return False, f"the process ended with exit code {self.process.exitcode}"
        return bool(ok), value

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def replaced(self) -> _Worker:
        self.end()
        return _Worker()


def on_ranks(ranks: int | None = 2, timeout: float = 120) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes `test(rank, size, *parameters)` a test whose body runs on each rank of a group of the session's pool.

    Without a number of `ranks`, `size` is one of the parameters.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(pool: Pool, **parameters: Any) -> None:
            pool.run(_call_body, test, parameters, ranks=parameters.pop("size", ranks), timeout=timeout)

        names = ("pool", *list(inspect.signature(body).parameters)[1 if ranks is None else 2 :])
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return test

    return decorate


def _call_body(rank: int, size: int, test: Any, parameters: dict[str, Any]) -> None:
    test.__wrapped__(rank, size, **parameters)  # a function travels by its name, which is the test's


def _serve(pipe: Connection) -> None:
    """Run what arrives until the other end is gone."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("default")
    gc.freeze()  # what was imported is not looked through again when a call's garbage is collected
    while True:
        try:
            function, args, rank, size, store = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, _as_rank(function, args, rank, size, store)
        except Exception:  # the traceback is the answer
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _as_rank(function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, store: str) -> Any:
    import torch
    import torch.distributed as dist

    from atorch.distributed import mesh

    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    before = modes()
    dist.barrier()  # a rank that has nothing to say must not close its connections before its peers have made theirs
    try:
        result = function(rank, size, *args)
    finally:
        mesh.set_current(None)
        gc.collect()
        dist.destroy_process_group()
        mesh.forget_shardings()
        gc.collect()  # whatever holds a group keeps its threads, which wake a hundred times a second
    assert modes() == before, f"modes of torch were left on: {modes()} for {before}"
    return result


def modes() -> dict[str, Any]:
    """What torch is set to in this thread, which whoever sets it puts back."""
    import torch
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    torch.autocast_increment_nesting()
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "autocasts around": torch.autocast_decrement_nesting(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch": _get_current_dispatch_mode_stack(),
        "functions": _get_current_function_mode_stack(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's worker processes."""
    pool = Pool()
    yield pool
    pool.close()
