"""The process of one engine: it answers all prompts, showing the text as it comes, and counts."""

import argparse
import json
import os
import time
from pathlib import Path

from demonstration.screen import WrappedWriter, line_width, show_progress

MAX_MODEL_LEN = 2048  # the draft's context


def answer_all(arguments: argparse.Namespace) -> None:
    """Answer every prompt, one after the other, showing the text as it comes."""
    config = arguments.config
    os.sched_setaffinity(0, {config["core"]})
    show_progress("loading ...")
    from vllm import LLM

    llm = LLM(
        model=config["model"],
        speculative_config=config["speculative_config"],
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
    )
    stream_answer(llm, "Hello!", tokens=8, show=lambda text: None)  # warm up: first calls are slower
    show_progress("")
    before, answers = read_counts(llm, arguments.answer_with), []
    start, delay = time.perf_counter(), seconds_kept_waiting()
    for prompt in arguments.prompts:
        print(f"\n  > {prompt}\n")
        writer = WrappedWriter(indent="    ", width=line_width())
        tokens, seconds = stream_answer(llm, prompt, arguments.tokens, writer.write)
        writer.end()
        note = f"{len(tokens)} tokens in {seconds:.1f} s, {len(tokens) / seconds:.1f} tokens/s"
        print(f"{note:>{line_width()}}", flush=True)
        answers.append({"tokens": tokens, "seconds": seconds})
    after = read_counts(llm, arguments.answer_with)
    counts = {key: after[key] - before[key] for key in after}
    shared = (seconds_kept_waiting() - delay) / (time.perf_counter() - start)
    Path(config["result"]).write_text(json.dumps({"answers": answers, "counts": counts, "shared": shared}))


def seconds_kept_waiting() -> float:
    """Return how long this process's main thread was ready to run while its core ran something else."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel without these statistics
        return 0.0


def stream_answer(llm, prompt: str, tokens: int, show) -> tuple[list[int], float]:
    """Run one request to its end; return its token ids and how long it took, prompt included."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    chat = [{"role": "user", "content": prompt}]
    ids = llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    parameters = SamplingParams(temperature=0.0, max_tokens=tokens, output_kind=RequestOutputKind.DELTA)
    token_ids: list[int] = []
    start = time.perf_counter()
    llm.llm_engine.add_request(f"demo-{start}", {"prompt_token_ids": ids}, parameters)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            token_ids += output.outputs[0].token_ids
            show(output.outputs[0].text)
    return token_ids, time.perf_counter() - start


def read_counts(llm, engine: str) -> dict[str, float]:
    """Return the totals so far of what the comparison needs; empty without speculation."""
    if engine == "saguaro":
        from vllm_ssd import get_stats

        stats = get_stats(llm)
        return {key: stats[key] for key in ("lookups", "hits", "part_hits", "accepted_tokens", "draft_restarts")}
    if engine == "draft_model":
        names = {
            "vllm:spec_decode_num_drafts": "lookups",
            "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
        }
        return {names[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in names}
    return {}
