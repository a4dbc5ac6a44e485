"""One benchmark from first engine to last: the methods take turns on each workload."""

import dataclasses
import sys
import time
from collections.abc import Sequence

from benchmark import plan
from benchmark.plan import Engine, Run, Workload
from benchmark.pool import EngineFailed, EnginePool
from benchmark.report import Result

_SETTLE_SECONDS = 0.4  # OpenMP threads of the last engine spin on for a moment
_IDLE_SECONDS = 0.6
_IDLE_LIMIT = 0.05


@dataclasses.dataclass
class Session:
    """Runs workloads on engines and gathers what comes of it."""

    pool: EnginePool
    run: Run
    """What to send; batch and temperature are replaced by the workload's."""
    repeats: int
    skip_wrong: bool
    """Leave out stock speculation where the CPU build would sample wrongly."""

    results: list[Result] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    failed: set[Engine] = dataclasses.field(default_factory=set)
    idle_shares: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # engine or "others" -> highest share of a core

    def measure(self, engines: Sequence[Engine], workload: Workload) -> None:
        """Run the workload on every engine, `repeats` times, in alternating order."""
        results = [Result(engine, workload) for engine in engines if self._is_wanted(engine, workload)]
        self.results += results
        for result in plan.alternate(results, self.repeats):
            if result.engine not in self.failed:
                self._measure_once(result)

    def _is_wanted(self, engine: Engine, workload: Workload) -> bool:
        if not self.skip_wrong or plan.samples_rightly_on_cpu(engine, workload):
            return True
        self._note(
            f"{engine} skipped at temperature {workload.temperature:g}: vLLM's CPU build samples "
            "wrongly under its own speculation (--force runs it all the same)"
        )
        return False

    def _measure_once(self, result: Result) -> None:
        run = dataclasses.replace(self.run, **dataclasses.asdict(result.workload))
        try:
            self.pool.start(result.engine)
            self._watch_idle()
            measurement, outputs = self.pool.run(result.engine, run)
        except EngineFailed as error:
            self.failed.add(result.engine)
            self._note(f"failed: {error}")
            return
        result.measurements.append(measurement)
        result.outputs.append(outputs)
        _log(f"{result.engine}, batch {run.batch}, temperature {run.temperature:g}: {measurement.tok_s:.1f} tok/s")

    def _watch_idle(self) -> None:
        """No engine works yet: whatever runs now would disturb the measurement to come."""
        time.sleep(_SETTLE_SECONDS)
        for name, share in self.pool.idle_shares(_IDLE_SECONDS).items():
            self.idle_shares[name] = max(self.idle_shares.get(name, 0.0), share)
            if share > _IDLE_LIMIT:
                who = "other processes" if name == "others" else f"idle {name}"
                self._note(f"{who} used the cores between measurements (see idle_core_share): the figures suffer")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _log(text)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
