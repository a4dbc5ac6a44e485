"""vLLM's V1 model runner with saguaro: thin overrides that hand on to `SaguaroDrafter`."""

import functools
from typing import Any

import torch

from vllm_ssd.integration.placeholders import without_placeholder_rows, without_placeholders
from vllm_ssd.integration.rejection_sampler import SaguaroRejectionSampler


class SaguaroRunner:
    """Mixed into `GPUModelRunner` or `CPUModelRunner`, before it in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rejection_sampler = SaguaroRejectionSampler(self.sampler, self.speculative_config, self.device)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """The target's forward; the draft hears of new prompts first."""
        self._scheduled_drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduler_output = without_placeholders(scheduler_output)
        self._kept_drafts = scheduler_output.scheduled_spec_decode_tokens
        self.drafter.begin_step(scheduler_output)
        return super().execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The rest of the step."""
        return super().sample_tokens(
            without_placeholder_rows(grammar_output, self._scheduled_drafts, self._kept_drafts)
        )

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            return super()._sample(logits, None)
        return super()._sample(logits, spec_decode_metadata)

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> torch.Tensor | None:
        if self.input_batch.sampling_metadata.all_greedy:
            return None
        return self.drafter.draft_probs(
            self.input_batch.req_ids, spec_decode_metadata.num_draft_tokens, self.input_batch.vocab_size, self.device
        )

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Drafts for the next step, ragged, in batch order."""
        most = getattr(scheduler_output, "num_spec_tokens_to_schedule", self.num_spec_tokens)
        return self.drafter.draft(self.input_batch, self.requests, sampled_token_ids, most)


@functools.cache
def with_saguaro(runner: type) -> type:
    """The runner class with saguaro in it."""
    return type(f"Saguaro{runner.__name__}", (SaguaroRunner, runner), {})
