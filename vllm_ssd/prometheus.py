"""The figures of one engine as Prometheus metrics: the table of them, and who writes them.

The figures arise in a worker, and are scraped at an API server, in another process. They travel
in the files of prometheus_client's own multiprocess mode, which its `MultiProcessCollector` reads
in as many processes as ask. A thread writes them once a second: a round pays nothing. Knows
nothing about vLLM, but for its way of naming.
"""

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

from vllm_ssd.metrics import Totals

logger = logging.getLogger("vllm.saguaro")

PREFIX = "vllm:saguaro_"
_SECONDS = 1.0  # between two writings
_FILES = {"counter": "counter", "histogram": "histogram", "gauge": "gauge_mostrecent"}
_number = count()


class Source(Protocol):
    """Where the figures come from; read from a thread of the exporter's."""

    @property
    def totals(self) -> Totals:
        """Totals since the start."""

    def stats(self) -> Mapping[str, float]:
        """Those that are numbers, and the state of the draft."""


@dataclass(frozen=True)
class Metric:
    """A metric and how its value is read."""

    name: str  # without the prefix, and for counters without `_total`
    kind: str  # "counter", "gauge" or "histogram"
    help: str
    label: str = ""  # beside model_name and engine
    values: Mapping[str, str] | None = None  # value of the label → key of the stats; None: the key is `name`


def _counter(name: str, text: str, **more) -> Metric:
    return Metric(name, "counter", text, **more)


_FALLBACKS = {"draft": "fallback_draft", "ngram": "fallback_ngram", "none": "fallback_none"}

METRICS = (
    _counter("rounds", "Steps of the target after which drafts were handed out."),
    _counter("verified_rows", "Requests that emitted tokens, summed over rounds."),
    _counter("lookups", "Requests, summed over rounds, that looked for drafts in their tree."),
    _counter("hits", "Lookups that found all the drafts the request could take."),
    _counter("part_hits", "Lookups that found some of them."),
    _counter("misses", "Lookups that found none."),
    _counter("lookups_per_pos", "Lookups by the number of drafts the verification before accepted.", label="position"),
    _counter("hits_per_pos", "Hits by the number of drafts the verification before accepted.", label="position"),
    _counter("fallbacks", "What requests that missed took instead.", label="kind", values=_FALLBACKS),
    _counter("late_rounds", "Rounds with an outcome that was foreseen but has fewer drafts than were planned."),
    _counter("drafted_tokens", "Draft tokens handed out for verification."),
    _counter("accepted_tokens", "Draft tokens that were accepted."),
    _counter("emitted_tokens", "Tokens that verifications emitted, bonus and recovery tokens included."),
    _counter("branches", "Branches that the draft began."),
    _counter("branches_cancelled", "Branches that an outcome stopped before all their drafts were built."),
    _counter("verify_seconds", "Time of the target's decoding steps: forward and sampling."),
    _counter("select_seconds", "Time of the target from emitted tokens to drafts handed over, without waiting."),
    _counter("wait_seconds", "Time the target waited for the draft."),
    _counter("draft_seconds", "Time the draft was at work, hidden behind the target or not."),
    _counter("draft_restarts", "How often the draft process was started again."),
    Metric("tree_step_seconds", "histogram", "Duration of a tree step of the draft: one token for every branch."),
    Metric("draft_up", "gauge", "1 if the draft (of several: each of them) is loaded and lives, 0 otherwise."),
    Metric(
        "draft_kv_cache_usage_perc",
        "gauge",
        "Share of the draft's KV cache in use. 1 means 100 percent.",
        values={"": "draft_kv_usage"},
    ),
)


class Exporter:
    """Writes the figures of one engine into a folder, until it is closed or its source is gone."""

    def __init__(self, directory: str, model_name: str, engine: int, num_positions: int) -> None:
        """`num_positions`: K + 1, the places where a verification may stop.

        Raises `OSError` if the folder is not there or not to be written to.
        """
        self._labels = (("model_name", model_name), ("engine", str(engine)))
        self._num_positions = num_positions
        mark = f"saguaro{os.getpid()}-{next(_number)}"
        self.files = {kind: os.path.join(directory, f"{stem}_{mark}.db") for kind, stem in _FILES.items()}
        self._dicts: dict[str, MmapedDict] = {}
        for kind, path in self.files.items():
            self._dicts[kind] = MmapedDict(path + ".new")
            os.rename(path + ".new", path)  # a reader never sees a file without its header
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._source: Callable[[], Source | None] = lambda: None

    @property
    def leftovers(self) -> list[str]:
        """What to remove if this process is killed; the folder goes if it is empty then."""
        paths = list(self.files.values())
        return [*paths, os.path.dirname(paths[0])]

    def start(self, source: Source) -> None:
        """Write now and once a second. Holds no reference to the source."""
        self._source = weakref.ref(source)
        self._write()
        self._thread = threading.Thread(target=self._run, name="saguaro-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last totals, which stay in the folder; what is true only of a living engine goes."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            while not self._closing.wait(_SECONDS) and self._write():
                pass
            self._write()
        except Exception:  # the engine is worth more than its figures
            logger.exception("saguaro: its Prometheus metrics are no longer brought up to date")
        finally:
            for values in self._dicts.values():
                values.close()
            with contextlib.suppress(OSError):
                os.remove(self.files["gauge"])

    def _write(self) -> bool:
        """Bring all values up to date; False if the source is gone."""
        source = self._source()
        if source is None:
            return False
        now = time.time()
        for kind, key, value in samples(source, self._labels, self._num_positions):
            self._dicts[kind].write_value(key, value, now)
        return True


Labels = tuple[tuple[str, str], ...]
"""Names and values."""


def samples(source: Source, labels: Labels, num_positions: int) -> Iterator[tuple[str, str, float]]:
    """Kind, key in the file, and value of every sample."""
    stats, totals = source.stats(), source.totals
    for metric in METRICS:
        name = PREFIX + metric.name
        if metric.kind == "histogram":
            steps = totals.tree_steps
            for bound, number in zip(steps.bounds, steps.counts):
                bucket = (*labels, ("le", floatToGoString(bound)))
                yield metric.kind, _key(name, name + "_bucket", bucket, metric.help), number
            yield metric.kind, _key(name, name + "_sum", labels, metric.help), steps.sum
            continue
        sample = name + "_total" if metric.kind == "counter" else name
        if metric.label == "position":
            values = {str(i): getattr(totals, metric.name)[i] for i in range(num_positions)}
        else:
            values = {value: stats[key] for value, key in (metric.values or {"": metric.name}).items()}
        for value, number in values.items():
            more = ((metric.label, value),) if metric.label else ()
            yield metric.kind, _key(name, sample, labels + more, metric.help), number


@functools.lru_cache(1000)
def _key(name: str, sample: str, labels: Labels, text: str) -> str:
    names, values = zip(*labels)
    return mmap_key(name, sample, names, values, text)
