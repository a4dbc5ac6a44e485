"""The process that holds a vLLM engine for a test: `python engine_worker.py`, driven by `engine.py`.

Reads one JSON object a line from standard input, answers each with one line on what was standard
output; everything that is printed or logged goes to standard error. The engine lives in this very
process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that requests can join and leave at known steps.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback


def main() -> None:
    """Make the engine that the first line asks for, then answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")  # not inherited by the draft
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    if settings["core"] is not None:
        os.sched_setaffinity(0, [settings["core"]])
    engine = None
    for line in _after_start(settings):
        try:
            if line is None:
                engine = Engine(settings["engine"])
                answer = {}
            else:
                request = json.loads(line)
                if request["op"] == "close":
                    return
                answer = getattr(engine, request.pop("op"))(**request)
            reply = {"answer": answer}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _after_start(settings: dict):
    for name in settings["patches"]:
        PATCHES[name]()
    yield None
    yield from sys.stdin


class Engine:
    """What a test can ask for."""

    def __init__(self, options: dict) -> None:
        from vllm import LLM

        self._llm = LLM(**options)
        self._engine = self._llm.llm_engine
        for pid in draft_pids(os.getpid()):
            _raise_priority(pid)

    def generate(
        self,
        requests: list[dict],
        sequential: bool = False,
        settled: bool = False,
        events: dict[str, str] | None = None,
    ) -> dict:
        """Run all requests to their ends.

        A request: `id`, `prompt` (text or token ids), `params`, `arrive` (step before which it
        joins), `abort` (step before which it is aborted). `sequential`: each joins when the one
        before is done. `settled`: the target samples when the draft has built all it can, as a
        slow target on an idle machine would. `events`: step → what is done to the draft before it.
        """
        waiting = sorted(enumerate(requests), key=lambda item: item[1].get("arrive", 0))
        aborts = {i: request["abort"] for i, request in enumerate(requests) if request.get("abort") is not None}
        events = {int(step): event for step, event in (events or {}).items()}
        results: list[dict] = [{"outputs": {}} for _ in requests]
        running: dict[str, int] = {}  # request id → place
        if settled:
            self._settle_before_sampling()
        step = 0
        while waiting or running:
            if not running and waiting and not sequential:
                step = max(step, waiting[0][1].get("arrive", 0))
            while waiting and (not running if sequential else waiting[0][1].get("arrive", 0) <= step):
                place, request = waiting.pop(0)
                self._add(request, aborted=place in aborts)
                running[request["id"]] = place
            for place, at in list(aborts.items()):
                if at <= step and running.get(requests[place]["id"]) == place:
                    self._engine.abort_request([requests[place]["id"]])
                    del running[requests[place]["id"]], aborts[place]
            if step in events:
                self.harm(events.pop(step))
            for output in self._engine.step():
                place = running.get(output.request_id)
                if place is None:
                    continue
                _keep(results[place], output)
                if output.finished:
                    del running[output.request_id]
            step += 1
        if settled:
            del self._runner()._sample
        for result in results:
            result["outputs"] = [result["outputs"][index] for index in sorted(result["outputs"])]
        return {"results": results, "steps": step}

    def _add(self, request: dict, aborted: bool) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = dict(request["params"])
        if (grammar := params.pop("structured_outputs", None)) is not None:
            params["structured_outputs"] = StructuredOutputsParams(**grammar)
        kind = RequestOutputKind.CUMULATIVE if aborted else RequestOutputKind.FINAL_ONLY
        prompt = request["prompt"]
        if not isinstance(prompt, str):
            prompt = TokensPrompt(prompt_token_ids=prompt)
        if "logit_bias" in params:  # JSON has no integer keys
            params = {**params, "logit_bias": {int(key): bias for key, bias in params["logit_bias"].items()}}
        self._engine.add_request(request["id"], prompt, SamplingParams(**params, output_kind=kind))

    def _settle_before_sampling(self) -> None:
        runner, pids = self._runner(), draft_pids(os.getpid())
        sample = runner._sample

        def settle_and_sample(*args, **kwargs):
            wait_until_settled(pids)
            return sample(*args, **kwargs)

        runner._sample = settle_and_sample

    def harm(self, event: str) -> dict:
        """Do something to the draft process: "kill", "stop", "continue" or "garbage" (it will raise).

        "kill 2": to the second of several.
        """
        event, _, number = event.partition(" ")
        if number:
            os.kill(self._runner().drafter._draft._members[int(number) - 1].pid, _SIGNALS[event])
            return {}
        if event == "garbage":
            self._runner().drafter._draft._channel.send(b"\xc1 no message")
            return {}
        for pid in draft_pids(os.getpid()):
            os.kill(pid, _SIGNALS[event])
        return {}

    def _runner(self):
        return self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def stats(self) -> dict:
        """`vllm_ssd.get_stats`."""
        import vllm_ssd

        return vllm_ssd.get_stats(self._llm)

    def metrics(self) -> dict:
        """vLLM's counters and histograms: name → value (sum, for a histogram)."""
        found = {}
        for metric in self._llm.get_metrics():
            value = next(getattr(metric, key) for key in ("value", "sum", "values") if hasattr(metric, key))
            found[metric.name] = found.get(metric.name, 0) + value if not isinstance(value, list) else value
        return found

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts."""
        tokenizer = self._llm.get_tokenizer()
        return [tokenizer.encode(text) for text in texts]

    def probe(self, names: list[str]) -> dict:
        """What stands in this process: which of these modules are imported, and the kinds of the parts."""
        config = self._engine.vllm_config
        return {
            "modules": [name for name in names if name in sys.modules],
            "worker_cls": str(config.parallel_config.worker_cls),
            "speculative_config": repr(config.speculative_config),
        }

    def expand_batch_to_tokens(self, values: list, counts: list[int]) -> list:
        """What this process's rejection sampler makes of it, with uninitialised memory that shows."""
        import torch
        from vllm.v1.sample import rejection_sampler

        new_empty = torch.Tensor.new_empty
        torch.Tensor.new_empty = lambda tensor, size, **_: torch.full((size,), -77, dtype=tensor.dtype)
        try:
            ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return rejection_sampler.expand_batch_to_tokens(torch.tensor(values), ends, sum(counts), 0, 1).tolist()
        finally:
            torch.Tensor.new_empty = new_empty

    def register_kernels_again(self) -> None:
        """What vLLM does first when another engine starts in this process."""
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()

    def fail(self) -> None:
        """End this process by an exception that nobody catches."""
        raise Uncaught("the test asked for it")


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


class Uncaught(BaseException):
    """Passes `except Exception`."""


def _keep(result: dict, output) -> None:
    for completion in output.outputs:
        result["outputs"][completion.index] = {
            "token_ids": list(completion.token_ids),
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "logprobs": _plain(completion.logprobs),
        }
    result["prompt_token_ids"] = list(output.prompt_token_ids or [])
    result["prompt_logprobs"] = _plain(output.prompt_logprobs)
    result["num_cached_tokens"] = output.num_cached_tokens


def _plain(logprobs) -> list | None:
    if logprobs is None:
        return None
    return [None if at is None else {str(token): entry.logprob for token, entry in at.items()} for at in logprobs]


def _raise_priority(pid: int) -> None:
    """Give a draft the priority of its target: it is to be tested beside other work on this machine."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def wait_until_settled(pids: list[int], longest: float = 1.0) -> None:
    """Return when these processes have nothing to do: none of their threads wants to run."""
    deadline = time.monotonic() + longest
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.0005)
        quiet = 0 if any(_wants_to_run(pid) for pid in pids) else quiet + 1


def _wants_to_run(pid: int) -> bool:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "R":
                    return True
    except OSError:  # it has just ended
        pass
    return False


def draft_pids(parent: int) -> list[int]:
    """Draft servers among the descendants of a process."""
    import psutil

    found = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if "vllm_ssd.draft.server" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


# ---- patches: what a test breaks on purpose, to see that it would notice ----


def _patch_q(change) -> None:
    """Exchange the q that drawn drafts are verified with.

    One-hot would not do: that is exact for drafts that were drawn, too.
    """
    from vllm_ssd.integration.v1_runner import SaguaroRunner

    right = SaguaroRunner._get_spec_decode_draft_probs

    def wrong(self, metadata):
        q = right(self, metadata)
        return None if q is None else change(q)

    SaguaroRunner._get_spec_decode_draft_probs = wrong


def _patch_flat_q() -> None:
    """Every token is said to have been equally probable."""
    _patch_q(lambda q: q * 0 + 1 / q.shape[1])


def _patch_q_of_another_row() -> None:
    """Each draft gets the law of the draft before it in the batch."""
    _patch_q(lambda q: q.roll(1, dims=0))


def _patch_no_mends() -> None:
    """vLLM's own `expand_batch_to_tokens`."""
    from vllm_ssd.integration import cpu_mends

    cpu_mends.apply = lambda: None


def _patch_no_empty_step() -> None:
    """A step without drafts goes through the rejection sampler."""
    from vllm_ssd.integration.v1_runner import SaguaroRunner

    del SaguaroRunner._sample


def _patch_full_depth() -> None:
    """As many drafts as were asked for, whether they pay or not."""
    from vllm_ssd.depth import DepthControl

    DepthControl._best = lambda self, rows: self._most


PATCHES = {
    "full_depth": _patch_full_depth,
    "flat_q": _patch_flat_q,
    "q_of_another_row": _patch_q_of_another_row,
    "no_mends": _patch_no_mends,
    "no_empty_step": _patch_no_empty_step,
}


if __name__ == "__main__":
    main()
