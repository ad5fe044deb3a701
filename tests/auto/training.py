"""Several cases in one group of processes, the one comparison with plain training, and what is logged meanwhile."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from atorch import auto_accelerate
from atorch.distributed import mesh
from atorch.logs import logger
from tests.pool import Pool


def _each(rank: int, size: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    results = []
    for case in cases:
        torch.manual_seed(0)
        try:
            results.append(function(rank, size, *case))
        except Exception as error:
            raise AssertionError(f"{case!r} failed") from error
        finally:
            mesh.set_current(None)
    return results


def run_each(
    pool: Pool, function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], ranks: int = 2, timeout: float = 240
) -> list[list[Any]]:
    """`pool.run(function, *case)` for every case, in one group of processes: the results by case, then by rank."""
    by_rank = pool.run(_each, function, list(cases), ranks=ranks, timeout=timeout)
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def steps(
    model: Any, optim: Any, loss_func: Any, batches: Iterable[Any], clip: Callable[[Any], Any] | None = None
) -> tuple[list[float], list[float]]:
    """The losses of a loop over batches of keywords or arguments, and the norms that `clip(model)` returns."""
    losses, norms = [], []
    for batch in batches:
        loss = loss_func(batch, model(**batch) if isinstance(batch, Mapping) else model(*batch))
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        if clip is not None:
            norms.append(float(clip(model)))
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def accelerate(
    model: Any, strategy: Any, data: Any = None, loss_func: Any = None, batch_size: int | None = None, **more: Any
) -> Any:
    """The result of auto_accelerate under SGD, by default at a rate of 0.1."""
    loader = {} if batch_size is None else {"dataloader_args": {"batch_size": batch_size}}
    given = {"optim_func": torch.optim.SGD, "optim_args": {"lr": 0.1}, "dataset": data, "loss_func": loss_func}
    return auto_accelerate(model, load_strategy=strategy, **{**given, **loader, **more})[1]


def accelerated_steps(result: Any, clip: Callable[[Any], Any] | None = None) -> tuple[list[float], list[float]]:
    """As `steps`, over the loader of an accelerated job on CPUs."""
    batches = (result.prepare_input(batch, torch.device("cpu")) for batch in result.dataloader)
    return steps(result.model, result.optim, result.loss_func, batches, clip)


def refusal(rank: int, size: int, function: Callable[..., Any], *args: Any) -> str:
    """The class and text of the error that `function(rank, size, *args)` raises."""
    try:
        function(rank, size, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function.__name__} of {args!r} raised nothing")


def assert_trains_like_plain(
    pool: Pool, deviation: Callable[..., float], cases: Iterable[tuple[Any, ...]], ranks: int = 2, band: float = 1e-4
) -> None:
    """Hold every case's deviation from plain training, on every rank, to `band`.

    deviation: (rank, size, *case) → ‖Δp − Δp_plain‖ / ‖Δp_plain‖ of the parameters p.
    """
    cases = list(cases)
    worst = [max(found) for found in run_each(pool, deviation, cases, ranks=ranks)]
    assert not [(off, case) for off, case in zip(worst, cases, strict=True) if not off <= band]


@contextmanager
def messages() -> Iterator[list[str]]:
    """Messages that atorch logs inside, also in a process of the pool."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
