"""The protocol: BF16 chooses the learning rate first, then every arm runs on every seed."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from tqdm import tqdm

from fp4_plugin.bench.ablation.arms import BASELINE
from fp4_plugin.bench.ablation.corpus import corpus_digest, corpus_source, open_data
from fp4_plugin.bench.ablation.results import ResultStore
from fp4_plugin.bench.ablation.settings import RunSettings, StudyOptions
from fp4_plugin.bench.ablation.training import RunResult, train
from fp4_plugin.errors import UnsupportedError
from fp4_plugin.pretrain.dataset import DataSource

__all__ = ["Outcome", "best_learning_rate", "run_study", "train_from_source"]

Train = Callable[[RunSettings, DataSource], RunResult]


@dataclass(frozen=True)
class Outcome:
    """All runs of a study; a run that served the sweep and an arm is in both lists."""

    options: StudyOptions
    learning_rate: float
    sweep: list[RunResult]
    runs: list[RunResult]

    def losses(self, arm: str) -> dict[int, float | None]:
        """Held-out loss by seed, None where the run diverged."""
        mine = [run for run in self.runs if run.settings.arm == arm]
        return {run.settings.seed: run.held_out_loss for run in mine}


def train_from_source(settings: RunSettings, source: DataSource) -> RunResult:
    """`train` for a worker process, which opens the (memory-mapped) corpus itself."""
    return train(settings, open_data(source, settings.model))


class _RunMaker:
    """Makes the runs that are not stored yet: in this process, or in `pool`."""

    def __init__(self, options: StudyOptions, train: Train, pool: Executor | None) -> None:
        self._store = ResultStore(options.output)
        self._pool = pool
        self._source = corpus_source(options)
        self._train = train

    def results(self, title: str, wanted: Sequence[RunSettings]) -> list[RunResult]:
        """One result per entry of `wanted`, in its order; each is on disk as soon as it is made."""
        stored = [self._store.load(settings) for settings in wanted]
        missing = [s for s, result in zip(wanted, stored, strict=True) if result is None]
        with tqdm(
            total=len(wanted), initial=len(wanted) - len(missing), desc=title, unit="run",
            disable=not sys.stderr.isatty(), dynamic_ncols=True,
        ) as bar:  # fmt: skip
            for result in self._make(missing):
                self._store.save(result)
                bar.update()
                bar.write(_line(title, result), file=sys.stdout)
                sys.stdout.flush()
        loaded = [self._store.load(settings) for settings in wanted]
        return [result for result in loaded if result is not None]

    def _make(self, missing: Sequence[RunSettings]) -> Iterator[RunResult]:
        if self._pool is None:
            yield from (self._train(settings, self._source) for settings in missing)
            return
        futures = [self._pool.submit(self._train, settings, self._source) for settings in missing]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise UnsupportedError(
                "a worker process was killed (out of memory?): start the same command again with "
                "fewer --jobs; finished runs are kept"
            ) from error


@contextlib.contextmanager
def _workers(jobs: int) -> Iterator[Executor | None]:
    """A pool of at most `jobs` processes, started as they are needed; None for one job."""
    if jobs == 1:
        yield None
        return
    # Spawned, not forked: a fork of a process with running threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _line(title: str, result: RunResult) -> str:
    settings, loss = result.settings, result.held_out_loss
    ending = (
        f"diverged after {len(result.train_losses)} steps"
        if loss is None
        else f"held-out loss {loss:.4f}"
    )
    return (
        f"{title}: {settings.arm}, seed {settings.seed}, learning rate "
        f"{settings.learning_rate:g}: {ending} ({result.seconds:.0f} s)"
    )


def best_learning_rate(sweep: Iterable[RunResult]) -> float:
    """The rate with the lowest held-out loss. Raises UnsupportedError if every run diverged."""
    finished = [(run.held_out_loss, run) for run in sweep if run.held_out_loss is not None]
    if not finished:
        raise UnsupportedError(
            "BF16 diverged at every learning rate of the sweep: give lower --learning-rates"
        )
    return min(finished, key=lambda pair: pair[0])[1].settings.learning_rate


def run_study(options: StudyOptions, train: Train = train_from_source) -> Outcome:
    """Sweep, then arms. Raises ConfigError or DataError before the first run."""
    corpus = corpus_digest(open_data(corpus_source(options), options.shape()))
    rates, first_seed = sorted(options.learning_rates), options.seeds[0]
    with _workers(options.jobs) as pool:
        maker = _RunMaker(options, train, pool)
        sweep = maker.results(
            "sweep", [options.run(BASELINE, first_seed, rate, corpus) for rate in rates]
        )
        best = best_learning_rate(sweep)
        # Arm by arm, not seed by seed: a study that is stopped has whole arms.
        wanted = [
            options.run(arm, seed, best, corpus)
            for arm in options.all_arms
            for seed in options.seeds
        ]
        return Outcome(options, best, sweep, maker.results("arms", wanted))
