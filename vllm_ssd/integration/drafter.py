"""What vLLM's runner knows as its drafter: one in each rank, made and loaded by vLLM.

Rank 0 has the draft process and decides; the other ranks only need the laws that sampled
drafts were drawn from, so that all verify alike.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from vllm_ssd.integration.dense_laws import dense_torch, one_hot, sparse, tried_dense
from vllm_ssd.integration.drafts import make_draft
from vllm_ssd.integration.request_options import wants_drafts
from vllm_ssd.metrics import PeriodicLog, Totals
from vllm_ssd.prometheus import Exporter
from vllm_ssd.proposer import DraftSampling, Proposal, Proposer, Row
from vllm_ssd.sdsl.hint import SizeHint

_MOST_TOP_K = 1 << 30  # more than any vocabulary, and within every integer type

logger = logging.getLogger("vllm.saguaro")


class SaguaroDrafter:
    """Joins the runner's batch and the proposer."""

    def __init__(self, vllm_config: Any) -> None:
        spec = vllm_config.speculative_config
        self._config = spec.saguaro
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._group = get_tp_group()
        self._offered: dict[str, Proposal] = {}
        self._scheduled: dict[str, list[int]] = {}
        self._step_began = 0.0
        self._decode_tokens = 0  # tokens of this step if all its rows decode, else 0
        self._proposer: Proposer | None = None
        self._drafts = False  # this rank has the draft, and nothing of ours went wrong
        self._dense = dense_torch
        if self._group.rank_in_group == 0:
            self._start(vllm_config, spec.real_vocab_size)

    def _start(self, vllm_config: Any, real_vocab_size: int) -> None:
        self._exporter = _exporter(vllm_config)
        leftovers = [] if self._exporter is None else self._exporter.leftovers
        self._draft = make_draft(self._config, real_vocab_size, vllm_config, leftovers)
        self._draft.start()  # loads while the target does
        self._proposer = Proposer(self._config, self._draft, real_vocab_size)
        if self._exporter is not None:
            self._exporter.start(self)
        self._ngrams = NgramProposer(vllm_config)
        # Numba compiles at the first look-up, for a second: not while requests are served.
        self._ngrams.propose(1, [[0]], np.ones(1, np.int32), np.zeros((1, self._max_model_len), np.int32))
        self._log = PeriodicLog()
        self._size_hint = SizeHint(
            vllm_config.model_config.model,
            self._config.model,
            self._config.num_speculative_tokens,
            self._config.size_hint,
        )
        self._drafts = True

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Wait for the draft; vLLM calls this after it loaded the target."""
        if self._group.device.type == "cuda":
            self._dense = tried_dense(self._vocab_size, self._group.device)
        if self._proposer is not None:
            self._draft.wait_until_ready(self._config.draft_start_timeout)

    def propose(self, *_args: Any, **_kwargs: Any) -> list[list[int]]:
        """Part of vLLM's drafter interface, which lacks request ids: the runner calls `draft`."""
        raise RuntimeError("saguaro drafts through SaguaroRunner.propose_draft_token_ids")

    def close(self) -> None:
        """End the draft process."""
        if self._proposer is not None:
            self._draft.close()
            if self._exporter is not None:
                self._exporter.close()

    def stats(self) -> dict[str, float | bool] | None:
        """Totals; None on ranks without the draft."""
        return None if self._proposer is None else self._proposer.stats()

    @property
    def totals(self) -> Totals:
        """The proposer's, on the rank with the draft."""
        return self._proposer.totals

    def report(self) -> dict[str, Any] | None:
        """The draft's latest report; None if there is none."""
        report = self._proposer and self._proposer.report
        return None if report is None else msgspec.to_builtins(report)

    # ---- a step ----

    def begin_step(self, scheduler_output: Any) -> None:
        """Before the target's forward: new prompts go to the draft, finished requests are freed."""
        self._step_began = time.perf_counter()
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_scheduled = scheduler_output.num_scheduled_tokens
        decodes = not scheduler_output.scheduled_new_reqs and all(
            count == 1 + len(self._scheduled.get(req_id, ())) for req_id, count in num_scheduled.items()
        )
        self._decode_tokens = scheduler_output.total_num_scheduled_tokens if decodes else 0
        for req_id in scheduler_output.finished_req_ids:
            self._offered.pop(req_id, None)
        if self._drafts:
            try:
                self._tell_of_requests(scheduler_output)
            except Exception:
                self._switch_off()

    def _tell_of_requests(self, scheduler_output: Any) -> None:
        self._proposer.finish(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            if request.prompt_token_ids and request.prompt_embeds is None and wants_drafts(params):
                self._proposer.start(request.req_id, request.prompt_token_ids, draft_sampling(params))
        self._proposer.send_news(scheduler_output.total_num_scheduled_tokens)

    def _switch_off(self) -> None:
        """After an error of our own: requests go on without drafts rather than die of it."""
        logger.exception("saguaro met an internal error; generation goes on without drafts")
        self._drafts = False
        self._draft.close()

    def draft(self, batch: Any, requests: dict[str, Any], emitted: Sequence[list[int]], most: int) -> list[list[int]]:
        """Drafts for each row of the batch, ragged. `emitted`: tokens of each row, empty if it is not done.

        On ranks other than 0 the lists are empty: only rank 0's reach the scheduler.
        """
        proposals = {}
        if self._drafts:
            try:
                proposals = self._propose(batch, requests, emitted, most)
            except Exception:
                self._switch_off()
        if self._group.world_size > 1 and not batch.sampling_metadata.all_greedy:
            proposals = self._group.broadcast_object(proposals, src=0)
        # A row that is not in this step keeps its drafts at the scheduler, and so must their laws be kept.
        here = set(batch.req_ids)
        waiting = {req_id: offer for req_id, offer in self._offered.items() if req_id not in here}
        self._offered = {**waiting, **proposals}
        if self._proposer is None:
            return [[] for _ in batch.req_ids]
        return [proposals[req_id].token_ids if req_id in proposals else [] for req_id in batch.req_ids]

    def _propose(
        self, batch: Any, requests: dict[str, Any], emitted: Sequence[list[int]], most: int
    ) -> dict[str, Proposal]:
        if self._decode_tokens:
            self._proposer.observe_verify(self._decode_tokens, time.perf_counter() - self._step_began)
        places = [i for i in range(len(batch.req_ids)) if emitted[i]]
        rows = [self._row(batch, requests, i, emitted[i], most) for i in places]

        def ngrams(wanted: Sequence[int]) -> dict[int, list[int]]:
            chosen = {places[row] for row in wanted}
            lookups = [emitted[i] if i in chosen else [] for i in range(len(batch.req_ids))]
            found = self._ngrams.propose(most, lookups, batch.num_tokens_no_spec, batch.token_ids_cpu)
            return {row: found[places[row]] for row in wanted}

        proposals = self._proposer.propose(rows, ngrams)
        self._log(self._proposer.totals)
        self._size_hint(self._proposer.totals)
        return {row.req_id: proposal for row, proposal in zip(rows, proposals)}

    def _row(self, batch: Any, requests: dict[str, Any], place: int, emitted: list[int], most: int) -> Row:
        req_id = batch.req_ids[place]
        length = int(batch.num_tokens_no_spec[place])
        request = requests[req_id]
        params = request.sampling_params
        limit = min(most, self._max_model_len - length - 1)
        if params is not None and params.max_tokens is not None:
            limit = min(limit, params.max_tokens - len(request.output_token_ids) - 1)
        if request.prompt_token_ids is None or not wants_drafts(params):
            limit = 0  # prompt embeddings: there are no tokens to draft or look up from
        return Row(
            req_id,
            length,
            emitted,
            len(self._scheduled.get(req_id, ())),
            max(limit, 0),
            history=lambda: batch.token_ids_cpu[place, :length],
        )

    # ---- verification ----

    def draft_probs(
        self, req_ids: Sequence[str], num_drafts: Sequence[int], vocab_size: int, device
    ) -> torch.Tensor | None:
        """q of the scheduled drafts: [sum(num_drafts), vocab_size] float32; None if all are one-hot.

        A draft without a law, or other than the one offered, is verified one-hot, which is exact
        for a token chosen in any way that does not look at the target's random numbers.
        """
        laws, sampled = [], False
        for req_id, count in zip(req_ids, num_drafts):
            if not count:
                continue
            scheduled = self._scheduled[req_id][:count]
            offer = self._offered.get(req_id)
            known = offer is not None and offer.token_ids[:count] == list(scheduled)
            for i, token_id in enumerate(scheduled):
                law = offer.laws[i] if known else None
                sampled = sampled or law is not None
                laws.append(law or one_hot(token_id))
        return self._dense(*sparse(laws, device), vocab_size) if sampled else None


def _exporter(vllm_config: Any) -> Exporter | None:
    """Who writes the Prometheus metrics of this engine, if somebody wants them."""
    directory = vllm_config.speculative_config.metrics_directory
    if directory is None:
        return None
    try:
        return Exporter(
            directory,
            model_name=str(vllm_config.model_config.served_model_name),
            engine=vllm_config.parallel_config.data_parallel_index,  # the rank is 0 in each independent engine
            num_positions=vllm_config.speculative_config.num_speculative_tokens + 1,
        )
    except OSError as error:  # the API server is on another machine, say
        logger.warning(
            "saguaro: there will be no Prometheus metrics of it, since %s cannot be used: %s", directory, error
        )
        return None


def draft_sampling(params: Any) -> DraftSampling:
    """How the drafts of a request with these `SamplingParams` are chosen.

    Greedy rows, rows with a seed (verified one-hot, see `rejection_sampler`) and rows with a
    grammar (vLLM cuts drafts that it refuses, which would change a sampled draft's law) take
    argmax drafts.
    """
    if params is None or params.temperature < 1e-5 or params.seed is not None or params.structured_outputs is not None:
        return DraftSampling()
    top_k = min(params.top_k, _MOST_TOP_K) if params.top_k and params.top_k > 0 else 0
    return DraftSampling(params.temperature, top_k, params.top_p)
