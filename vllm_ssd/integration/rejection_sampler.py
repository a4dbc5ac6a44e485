"""Seeded requests: the same seed gives the same text, whatever the drafts were.

vLLM's rejection sampler spends random numbers by the number of drafts, and which drafts a row
gets depends on timing here. Rows with a seed are therefore sampled token by token with the
very calls that vLLM makes without speculation, and a draft is right if it is the token that
came out: the text is the one vLLM gives without speculation. A draft is accepted with
probability p(draft), as with any one-hot draft.
"""

import dataclasses
from collections.abc import Sequence

import torch
from vllm.v1.sample import rejection_sampler as vllm_rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

_vllm_rejection_sample = vllm_rejection_sampler.rejection_sample


class SaguaroRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, exact for seeded rows too."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ):
        """As vLLM's; `logits` are [num_drafts + batch_size, vocab_size]."""
        seeded = {
            row: generator for row, generator in sampling_metadata.generators.items() if metadata.num_draft_tokens[row]
        }
        if not seeded:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        # The bonus token is sampled first here, but is the last in the order of the text: it
        # takes a copy of the generator that stands where that order will have brought it.
        bonus_generators = dict(sampling_metadata.generators)
        for row, generator in seeded.items():
            bonus_generators[row] = self._ahead(generator, metadata.num_draft_tokens[row], logits)
        sample = _SeededRows(self, seeded, bonus_generators)
        vllm_rejection_sampler.rejection_sample = sample
        try:
            return super().forward(
                metadata, draft_probs, logits, dataclasses.replace(sampling_metadata, generators=bonus_generators)
            )
        finally:
            vllm_rejection_sampler.rejection_sample = _vllm_rejection_sample

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """One token from processed logits [1, vocab_size], as vLLM draws it without speculation."""
        token_ids, _ = self.sampler.topk_topp_sampler(logits, {0: generator}, None, None)
        return int(token_ids[0])

    def _ahead(self, generator: torch.Generator, num_draws: int, logits: torch.Tensor) -> torch.Generator:
        ahead = copy_generator(generator)
        for _ in range(num_draws):
            self.draw(torch.zeros_like(logits[:1], dtype=torch.float32), ahead)
        return ahead


class _SeededRows:
    """Stands in for vLLM's `rejection_sample` during one call."""

    def __init__(self, sampler: SaguaroRejectionSampler, seeded: dict, bonus_generators: dict) -> None:
        self._sampler = sampler
        self._seeded = seeded
        self._bonus_generators = bonus_generators

    def __call__(
        self,
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        # After the bonus draw these generators stand where all drafts accepted would leave them;
        # vLLM's call below may not spend from them.
        after_all = {row: copy_generator(self._bonus_generators[row]) for row in self._seeded}
        output = _vllm_rejection_sample(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            *args,
            **kwargs,
        )
        drafts = draft_token_ids.tolist()
        starts = [0, *cu_num_draft_tokens.tolist()]
        for row, generator in self._seeded.items():
            rows = range(starts[row], starts[row + 1])
            tokens = self._verify([drafts[i] for i in rows], target_logits[rows.start : rows.stop], generator)
            if len(tokens) == len(rows) and tokens == [drafts[i] for i in rows]:
                tokens.append(int(bonus_token_ids[row]))
                generator.set_state(after_all[row].get_state())
            output[row] = vllm_rejection_sampler.PLACEHOLDER_TOKEN_ID
            output[row, : len(tokens)] = torch.as_tensor(tokens, dtype=output.dtype, device=output.device)
        return output

    def _verify(self, drafts: Sequence[int], logits: torch.Tensor, generator: torch.Generator) -> list[int]:
        """Sample position by position until a token is not the draft. `logits`: [num_drafts, vocab_size]."""
        tokens: list[int] = []
        for position, draft in enumerate(drafts):
            tokens.append(self._sampler.draw(logits[position : position + 1].clone(), generator))
            if tokens[-1] != draft:
                break
        return tokens


def copy_generator(generator: torch.Generator) -> torch.Generator:
    """A generator that will yield the same numbers."""
    other = torch.Generator(device=generator.device)
    other.set_state(generator.get_state())
    return other
