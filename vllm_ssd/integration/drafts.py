"""Which draft a target gets: a process of its own, several of them, or one that it shares."""

import os
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_ssd import devices
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.group import DraftGroup
from vllm_ssd.draft.identity import identify
from vllm_ssd.draft.launcher import DraftProcess
from vllm_ssd.draft.link import DraftLink
from vllm_ssd.draft.remote import RemoteDraft


def make_draft(
    config: SaguaroConfig, vocab_size: int, vllm_config: Any, leftovers: list[str]
) -> DraftLink | DraftGroup:
    """A handle on the draft, not started yet.

    `vocab_size`: token ids from here on are padding. `leftovers`: files and folders that a draft of
    our own removes should the target die.
    """
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    if config.draft_address is not None:
        return RemoteDraft(config, identify(config), vocab_size, max_num_seqs, cores=_cores_for_messages())
    if vllm_config.speculative_config.ray_draft is not None:
        from vllm_ssd.draft.ray_actor import RayDraft

        name = vllm_config.speculative_config.ray_draft
        return RayDraft(config, identify(config), vocab_size, max_num_seqs, name, cores=_cores_for_messages())
    settings = {
        "vocab_size": vocab_size,
        "max_num_seqs": max_num_seqs,
        "max_model_len": vllm_config.model_config.max_model_len,
        "leftovers": leftovers,
    }
    platform, num_gpus = current_platform.device_type, torch.cuda.device_count()
    if config.draft_devices is not None:
        group = devices.read_group(config.draft_devices, platform, num_gpus)
        parts = enumerate(group)
        return DraftGroup([DraftProcess(config, at, part=i, num_parts=len(group), **settings) for i, at in parts])
    # One device for each data parallel rank on this machine; a rank by itself has no number.
    rank = vllm_config.parallel_config.data_parallel_rank_local or 0
    setting = config.draft_device.split("|")
    device = devices.read_draft_device(setting[rank if rank < len(setting) else 0], platform, num_gpus)
    return DraftProcess(config, device, **settings)


def _cores_for_messages() -> tuple[int, ...]:
    """Cores that this process leaves: moving messages must not take time from a target on a CPU."""
    if not current_platform.is_cpu():
        return ()
    own = os.sched_getaffinity(0)
    return tuple(core for core in devices.online_cores() if core not in own)
