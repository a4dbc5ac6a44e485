"""What is checked before an engine with saguaro starts; each refusal is one sentence."""

import dataclasses
import os
from typing import Any

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import choose_cores, choose_gpu, read_draft_device
from vllm_ssd.integration.hooks import check_hooks


def build(options: dict[str, Any], target_model_config: Any, target_parallel_config: Any):
    """Check everything, choose our worker, and make the speculative config.

    Raises `ValueError` naming the option, or `RuntimeError` if this vLLM is not supported.
    """
    check_hooks()
    if "trust_remote_code" in options:
        raise ValueError(
            "speculative_config: 'trust_remote_code' is no key of method 'saguaro'; "
            "the draft follows the target's --trust-remote-code."
        )
    given = {key: value for key, value in options.items() if key not in ("method", *_FROM_ENGINE)}
    config = SaguaroConfig.from_mapping({**given, "trust_remote_code": target_model_config.trust_remote_code})
    _check_parallel(target_parallel_config)
    config = dataclasses.replace(config, draft_device=_draft_device(config, target_parallel_config))
    real_vocab_size = _check_models(config, target_model_config)

    from vllm_ssd.integration.speculative_config import make_speculative_config

    target_parallel_config.worker_cls = _worker_class(target_parallel_config)
    return make_speculative_config(config, target_model_config, target_parallel_config, real_vocab_size)


_FROM_ENGINE = ("target_model_config", "target_parallel_config")


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: "
            "method 'saguaro' needs pipeline_parallel_size=1; use tensor_parallel_size instead."
        )
    if parallel.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size is {parallel.data_parallel_size}: method 'saguaro' needs data_parallel_size=1; "
            "start one server for each replica, each with a draft of its own."
        )
    if parallel.distributed_executor_backend == "ray":
        raise ValueError(
            "distributed_executor_backend is 'ray': method 'saguaro' does not place its draft with Ray yet; "
            "use 'mp' or 'uni'."
        )


def _draft_device(config: SaguaroConfig, parallel: Any) -> str:
    """The device's name, with "auto" resolved to what the target leaves."""
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    platform = "cpu" if current_platform.is_cpu() else current_platform.device_type
    num_gpus = 0 if platform == "cpu" else torch.cuda.device_count()
    device = read_draft_device(config.draft_device, platform, num_gpus)
    if device is None and platform == "cpu":
        device = choose_cores(envs.VLLM_CPU_OMP_THREADS_BIND, os.sched_getaffinity(0))
    return str(device or choose_gpu(num_gpus, parallel.world_size))


def _check_models(config: SaguaroConfig, target: Any) -> int:
    """Refuse a draft that is not there or has another tokenizer; returns the real vocabulary's size."""
    from transformers import AutoConfig, AutoTokenizer

    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        draft = AutoConfig.from_pretrained(config.model, **options).get_text_config()
    except Exception as error:  # transformers raises many kinds
        missing = _looks_like_path(config.model) and not os.path.exists(config.model)
        what = "does not exist" if missing else f"cannot be read ({str(error).splitlines()[0]})"
        raise ValueError(
            f"speculative_config['model'] is {config.model!r}, which {what}; "
            "give a folder or a hub name of a transformers model."
        ) from error
    try:
        draft_tokenizer = AutoTokenizer.from_pretrained(config.model, **options)
    except Exception as error:
        raise ValueError(
            f"speculative_config['model']: the tokenizer of {config.model!r} cannot be read "
            f"({str(error).splitlines()[0]}); it is needed to see that draft and target share one."
        ) from error
    target_tokenizer = AutoTokenizer.from_pretrained(
        target.tokenizer, revision=target.tokenizer_revision, trust_remote_code=target.trust_remote_code
    )
    vocabulary = target_tokenizer.get_vocab()
    if draft_tokenizer.get_vocab() != vocabulary:
        raise ValueError(
            f"speculative_config['model']: the tokenizer of {config.model!r} is not the target's; "
            "choose a draft with the same tokenizer (a padded vocabulary is fine)."
        )
    return min(max(vocabulary.values()) + 1, draft.vocab_size, target.get_vocab_size())


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") != 1


def _worker_class(parallel: Any) -> str:
    from vllm.platforms import current_platform

    if parallel.worker_cls != "auto":
        raise ValueError(
            f"worker_cls is {parallel.worker_cls!r}: method 'saguaro' brings its own worker; "
            "leave worker_cls at 'auto'."
        )
    name = "SaguaroCPUWorker" if current_platform.is_cpu() else "SaguaroGPUWorker"
    return f"vllm_ssd.integration.worker.{name}"
