"""vLLM's Ray executor with a place for the draft: one more bundle of the target's placement group.

vLLM hangs if the group has more bundles on the driver's node than the target has ranks, unless it is
told which are the target's; and an actor aimed at an occupied bundle waits without a word. So the
bundles are assigned here, and every wait has a limit and says what it waited for.
"""

import contextlib
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from vllm_ssd.draft.ray_actor import start_actor
from vllm_ssd.integration.ray_bundles import Assignment, assign

logger = logging.getLogger("vllm.saguaro")

_PLACE_SECONDS = 60.0  # for Ray to start the actor's process
_REPORT_EVERY = 10.0
_FOR_THE_DRAFT = ("HF_", "TRANSFORMERS_", "VLLM_LOGGING_LEVEL", "TORCH")


class SaguaroRayExecutor(RayExecutorV2):
    """Reserves a device for the draft, starts it there, and ends it with the engine."""

    _draft_actor: Any = None
    _own_group: Any = None

    def _init_executor(self) -> None:
        try:
            group = self._placement_group()
            self.parallel_config.placement_group = group
            assignment = self._assign(group)
            self._start_draft(group, assignment)
            with _bundle_indices(assignment.target):
                super()._init_executor()
        except BaseException:
            self._release()
            raise

    def shutdown(self) -> None:
        """End the workers, then the draft; give back what was reserved for them."""
        super().shutdown()
        self._release()

    def _release(self) -> None:
        actor, self._draft_actor = self._draft_actor, None
        group, self._own_group = self._own_group, None
        if not ray.is_initialized():
            return
        with contextlib.suppress(RayError):
            if actor is not None:
                ray.kill(actor)
            if group is not None:  # a job may go on, and start other engines
                ray.util.remove_placement_group(group)

    # ---- bundles ----

    def _placement_group(self) -> Any:
        """The user's group, or one with a bundle more than the target has ranks."""
        config = self.parallel_config
        if not ray.is_initialized():
            ray.init(runtime_env=config.ray_runtime_env)
        group = config.placement_group or ray.util.get_current_placement_group()
        if group is not None:
            _wait_for_the_users(group, self._saguaro.draft_start_timeout)
            return group
        device, count = current_platform.ray_device_key, self.parallel_config.world_size + 1
        self._own_group = ray.util.placement_group([{device: 1.0}] * count, strategy="PACK")
        _wait_for(self._own_group, device, count, self._saguaro.draft_start_timeout)
        return self._own_group

    @property
    def _saguaro(self) -> Any:
        return self.vllm_config.speculative_config.saguaro

    def _assign(self, group: Any) -> Assignment:
        device = current_platform.ray_device_key
        nodes = placement_group_table(group)["bundles_to_node_id"]
        bundles = [(index, nodes[index]) for index, spec in enumerate(group.bundle_specs) if spec.get(device, 0) >= 1]
        chosen = [int(index) for index in (envs.VLLM_RAY_BUNDLE_INDICES or "").split(",") if index]
        try:
            found = assign(bundles, self.parallel_config.world_size, ray.get_runtime_context().get_node_id(), chosen)
        except ValueError as error:
            raise ValueError(f"saguaro on Ray: {error}.") from None
        logger.info("target on bundles %s, draft on bundle %d of the placement group", found.target, found.draft)
        return found

    # ---- the draft ----

    def _start_draft(self, group: Any, assignment: Assignment) -> None:
        spec = self.vllm_config.speculative_config
        name = f"saguaro-draft-{uuid.uuid4().hex}"
        device = current_platform.ray_device_key
        options = {"num_gpus": 1} if device == "GPU" else {"num_gpus": 0, "resources": {device: 1}}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=assignment.draft
        )
        self._draft_actor = start_actor(
            name,
            options,
            config=dataclasses.asdict(self._saguaro),
            vocab_size=spec.real_vocab_size,
            device=self._saguaro.draft_device,
            environment={k: v for k, v in os.environ.items() if k.startswith(_FOR_THE_DRAFT)},
        )
        try:
            node, pid = ray.get(self._draft_actor.where.remote(), timeout=_PLACE_SECONDS)
        except GetTimeoutError:
            wanted = placement_group_table(group)["bundles_to_node_id"].get(assignment.draft)
            raise RuntimeError(
                f"saguaro on Ray: bundle {assignment.draft} of the placement group (node {wanted}) did not take the "
                f"draft's actor within {_PLACE_SECONDS:.0f} s: something else occupies it, or its node is gone; "
                "see `ray status` and `ray list actors`, or add a bundle."
            ) from None
        except RayError as error:
            raise RuntimeError(f"saguaro on Ray: the draft's actor did not start: {error}") from error
        self._draft_actor.endpoint.remote()  # loads while the target does
        spec.ray_draft = name
        logger.info("draft actor %s has process %d on node %s", name, pid, node)


def _wait_for(group: Any, device: str, count: int, seconds: float) -> None:
    """Until Ray reserved the group. Raises `RuntimeError` saying what the cluster lacks."""
    began = time.monotonic()
    ready = group.ready()
    while not ray.wait([ready], timeout=min(_REPORT_EVERY, seconds))[0]:
        total, free = (found.get(device, 0) for found in (ray.cluster_resources(), ray.available_resources()))
        if time.monotonic() - began > seconds:
            raise RuntimeError(
                f"saguaro on Ray: no placement group of {count} bundles with one {device} each within {seconds:.0f} s "
                f"(draft_start_timeout): the target takes {count - 1}, the draft 1; the cluster at {_cluster()} has "
                f"{total:.0f}, {free:.0f} of them free. Add devices or lower tensor_parallel_size."
            )
        logger.info(
            "waiting for %d bundles with one %s each; %d of %d are free at %s", count, device, free, total, _cluster()
        )


def _wait_for_the_users(group: Any, seconds: float) -> None:
    """Until Ray reserved the user's group. Raises `RuntimeError` if it does not, or does not know it."""
    if "bundles_to_node_id" not in placement_group_table(group):
        raise RuntimeError(
            f"saguaro on Ray: the engine is connected to the Ray cluster at {_cluster()}, which does not know the "
            "placement group; set RAY_ADDRESS for the engine, in an actor by its "
            "runtime_env={'env_vars': {'RAY_ADDRESS': ...}}."
        )
    if not group.wait(seconds):
        raise RuntimeError(
            f"saguaro on Ray: the placement group was not reserved within {seconds:.0f} s (draft_start_timeout): "
            f"{group.bundle_specs}; see `ray status`."
        )


def _cluster() -> str:
    return ray.get_runtime_context().gcs_address


@contextlib.contextmanager
def _bundle_indices(target: tuple[int, ...]) -> Iterator[None]:
    """Tell vLLM which bundles are the target's, in this process and for as long as it asks."""
    before = os.environ.get("VLLM_RAY_BUNDLE_INDICES")
    os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, target))
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_RAY_BUNDLE_INDICES"]
        else:
            os.environ["VLLM_RAY_BUNDLE_INDICES"] = before
