"""Fingerprints by which a target and a shared draft, perhaps on two machines, see that they mean the
same model and the same vocabulary."""

import hashlib
import json
from dataclasses import dataclass

from vllm_ssd.config import SaguaroConfig

_OF_THE_FILE_ONLY = ("_name_or_path", "_commit_hash", "transformers_version")


@dataclass(frozen=True)
class Identity:
    """Digests of a draft model."""

    model: str  # of its config.json
    vocabulary: str  # of its tokens and their ids
    num_tokens: int  # the largest token id plus 1


def identify(config: SaguaroConfig) -> Identity:
    """Read the model's configuration and tokenizer (no weights); what transformers raises passes through."""
    from transformers import AutoTokenizer, PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(config.model, revision=config.revision)
    vocabulary = AutoTokenizer.from_pretrained(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    ).get_vocab()
    return Identity(
        _digest({key: value for key, value in written.items() if key not in _OF_THE_FILE_ONLY}),
        _digest(vocabulary),
        max(vocabulary.values()) + 1,
    )


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
