"""What is checked before an engine with saguaro starts; each refusal is one sentence."""

import dataclasses
import os
from typing import Any

from vllm_ssd.addresses import targets_keys
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import check_shared_gpus, choose_cores, choose_gpus, read_draft_devices, read_group, split_cores
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
    if target_parallel_config.distributed_executor_backend == "ray" and config.draft_address is None:
        from vllm_ssd.integration.ray_executor import SaguaroRayExecutor

        target_parallel_config.distributed_executor_backend = SaguaroRayExecutor
    return make_speculative_config(config, target_model_config, target_parallel_config, real_vocab_size)


_FROM_ENGINE = ("target_model_config", "target_parallel_config")


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: "
            "method 'saguaro' needs pipeline_parallel_size=1; use tensor_parallel_size instead."
        )
    if parallel.data_parallel_size > 1 and parallel.data_parallel_backend != "mp":
        raise ValueError(
            f"data_parallel_backend is {parallel.data_parallel_backend!r}: method 'saguaro' runs its data parallel "
            "ranks as processes; use 'mp'."
        )
    if parallel.use_ray and parallel.data_parallel_size > 1:
        raise ValueError(
            f"distributed_executor_backend is 'ray' and data_parallel_size {parallel.data_parallel_size}: "
            "method 'saguaro' does one of both; start one engine for each replica, or share a draft (draft_address)."
        )


def _draft_device(config: SaguaroConfig, parallel: Any) -> str:
    """The device's name, with "auto" resolved to what the target leaves; a shared draft has its own.

    Of several data parallel ranks on this machine: their devices, joined by "|".
    """
    if config.draft_address is not None:
        _check_keys(config)
        return config.draft_device
    if parallel.data_parallel_size_local == 0 or getattr(parallel, "node_rank_within_dp", 0) > 0:
        return config.draft_device  # rank 0, which has the draft, is on another node, which checks its own
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    platform = "cpu" if current_platform.is_cpu() else current_platform.device_type
    num_gpus = 0 if platform == "cpu" else torch.cuda.device_count()
    if config.draft_devices is not None:
        _check_alone(config, parallel)
        group = read_group(config.draft_devices, platform, num_gpus)
        if platform != "cpu":
            check_shared_gpus(group, _target_gpus(parallel, 1), config.draft_kv_cache_memory_bytes)
        return config.draft_device
    if parallel.use_ray and platform != "cpu":
        if config.draft_device != "auto":
            raise ValueError(
                f"speculative_config['draft_device'] is {config.draft_device!r}: on Ray the draft gets the device of a "
                "bundle of the placement group; leave it at 'auto'."
            )
        return config.draft_device
    num_ranks = parallel.data_parallel_size_local
    found = read_draft_devices(config.draft_device, platform, num_gpus, num_ranks)
    if found is None and platform == "cpu":
        left = choose_cores(envs.VLLM_CPU_OMP_THREADS_BIND, os.sched_getaffinity(0))
        found = split_cores(left, num_ranks) if num_ranks > 1 else [left]
    elif found is None:
        if num_ranks == 1 and _others_may_be_here(parallel):
            raise ValueError(
                "speculative_config['draft_device'] is 'auto': data parallel ranks that are started one by one do not "
                "see which GPUs the others take; name one that this rank sees and no target takes, for example "
                "'cuda:1', or share a draft (draft_address)."
            )
        found = choose_gpus(num_gpus, _target_gpus(parallel, num_ranks), num_ranks)
    if platform != "cpu":
        check_shared_gpus(found, _target_gpus(parallel, num_ranks), config.draft_kv_cache_memory_bytes)
    return "|".join(map(str, found))


def _others_may_be_here(parallel: Any) -> bool:
    """Whether data parallel ranks that other programs start may run on this machine.

    Else a program starts all of a machine's ranks, and one alone may be all.
    """
    one_by_one = (
        getattr(parallel, "data_parallel_external_lb", False)
        or getattr(parallel, "data_parallel_rank_local", None) is not None
    )
    return parallel.data_parallel_size > 1 and one_by_one


def _target_gpus(parallel: Any, num_ranks: int) -> set[int]:
    """Indices of the GPUs that the target takes on this machine, among those that are visible."""
    from vllm.platforms import current_platform

    size = getattr(parallel, "local_world_size", parallel.world_size)
    # Set where ranks are programs of the user's; else a rank that is started by itself takes the first it sees.
    first = size * (getattr(parallel, "data_parallel_rank_local", None) or 0)
    physical = getattr(parallel, "assigned_physical_gpu_ids", None)  # of --device-ids
    if physical is None:
        return set(range(first, first + size * num_ranks))
    visible = os.environ.get(current_platform.device_control_env_var)
    known = list(range(max(physical) + 1))
    if visible:
        known = [current_platform.device_control_id_to_physical_device_id(each) for each in visible.split(",")]
    # What is listed beyond these is not used; what is not visible vLLM refuses.
    return {known.index(each) for each in physical[first : first + size * num_ranks] if each in known}


def _check_alone(config: SaguaroConfig, parallel: Any) -> None:
    """Several drafts are for one target whose devices are named: not for Ray, nor for several ranks here."""
    found = f"speculative_config['draft_devices'] is {list(config.draft_devices)!r}"
    if parallel.use_ray:
        raise ValueError(
            f"{found}: on Ray there is one draft, in a bundle of the placement group; leave it out, or use "
            "distributed_executor_backend 'mp'."
        )
    if parallel.data_parallel_size_local > 1:
        raise ValueError(
            f"{found}: the target has {parallel.data_parallel_size_local} data parallel ranks on this machine, which "
            "have one draft each; name theirs in draft_device, joined by '|', or start one engine for each replica."
        )


def _check_keys(config: SaguaroConfig) -> None:
    if config.draft_keys is None:
        return
    try:
        targets_keys(config.draft_keys)
    except ValueError as error:
        raise ValueError(f"speculative_config['draft_keys'] is {config.draft_keys!r}: {error}.") from None


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
    try:
        target_tokenizer = AutoTokenizer.from_pretrained(
            target.tokenizer, revision=target.tokenizer_revision, trust_remote_code=target.trust_remote_code
        )
    except Exception as error:
        raise ValueError(
            f"tokenizer is {target.tokenizer!r}, which cannot be read ({str(error).splitlines()[0]}); method 'saguaro' "
            "needs the target's tokenizer to see that draft and target share one."
        ) from error
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
