"""Where the draft runs, on machines that are made up."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd import devices
from vllm_ssd.devices import (
    DraftDevice,
    check_shared_gpus,
    choose_cores,
    choose_gpus,
    gpu_index,
    parse_cores,
    read_draft_device,
    read_group,
)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "online_cores", lambda: tuple(range(8)))


@pytest.mark.parametrize(
    ("text", "cores"),
    (("3", (3,)), ("2-5", (2, 3, 4, 5)), ("2-4,8", (2, 3, 4, 8)), (" 1 , 0-1", (0, 1)), ("5-5\n", (5,))),
)
def test_core_lists_are_read(text: str, cores: tuple[int, ...]) -> None:
    """A list of cores as Linux and vLLM write it is misread."""
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ("", "a", "1-", "-1", "1,,2", "1;2", "1-2-3", "0x1", "5-2"))
def test_other_core_lists_are_refused(text: str) -> None:
    """A typo pins the draft to some other cores."""
    with pytest.raises(ValueError, match="is not a (core|range)"):
        parse_cores(text)


@given(cores=st.sets(st.integers(0, 500), min_size=1))
def test_core_lists_come_back(cores: set[int]) -> None:
    """A core is lost or doubled."""
    assert parse_cores(",".join(map(str, cores))) == tuple(sorted(cores))


@pytest.mark.parametrize(
    ("setting", "platform", "num_gpus", "device"),
    (
        ("auto", "cuda", 2, None),
        ("auto", "cpu", 0, None),
        ("cpu:1", "cpu", 0, DraftDevice("cpu", (1,))),
        ("cpu:2-5", "cuda", 1, DraftDevice("cpu", (2, 3, 4, 5))),
        ("cuda:1", "cuda", 2, DraftDevice("cuda:1")),
        ("cuda:0", "cuda", 1, DraftDevice("cuda:0")),
    ),
)
def test_settings_are_read(setting: str, platform: str, num_gpus: int, device: DraftDevice | None) -> None:
    """A documented device is refused or becomes another one."""
    assert read_draft_device(setting, platform, num_gpus) == device


@pytest.mark.parametrize(
    ("setting", "platform", "num_gpus", "hint"),
    (
        ("cpu", "cpu", 0, "cpu:2-5"),
        ("cpu:x", "cpu", 0, "cpu:1"),
        ("cpu:7-8", "cpu", 0, "no core 8; it has 0-7"),
        ("cpu:0-999999999", "cpu", 0, "beyond any machine"),
        ("cuda", "cuda", 2, "cuda:1"),
        ("cuda:", "cuda", 2, "cuda:1"),
        ("cuda:-1", "cuda", 2, "cuda:1"),
        ("cuda:2", "cuda", 2, "the last of 2 is 'cuda:1'"),
        ("cuda:0", "cpu", 0, "built for CPUs"),
        ("gpu:1", "cuda", 2, "cuda:1"),
        ("", "cuda", 2, "auto"),
        ("AUTO", "cuda", 2, "auto"),
    ),
)
def test_wrong_settings_are_refused_by_key(setting: str, platform: str, num_gpus: int, hint: str) -> None:
    """A device that is not there fails later, in the draft process, or without saying what would be right."""
    with pytest.raises(ValueError) as caught:
        read_draft_device(setting, platform, num_gpus)
    assert_refusal(str(caught.value), "draft_device", setting, hint)


def assert_refusal(message: str, key: str, setting: str | list[str], hint: str) -> None:
    """One sentence that names the option and what was given, and says what would be right."""
    assert message.startswith(f"speculative_config[{key!r}] is {setting!r}: ")
    assert hint in message
    assert "\n" not in message and message.endswith(".")


def test_a_group_is_read() -> None:
    """A part of the tree gets the device of another, or drafts must not share the cores of a small machine."""
    assert read_group(["cuda:1", "cuda:0"], "cuda", 2) == [DraftDevice("cuda:1"), DraftDevice("cuda:0")]
    found = read_group(["cpu:1", "cpu:1-2", "cpu:1"], "cpu", 0)
    assert [device.cores for device in found] == [(1,), (1, 2), (1,)]


@pytest.mark.parametrize(
    ("settings", "platform", "num_gpus", "hint"),
    (
        (["cuda:0", "cuda:2"], "cuda", 2, "of 'cuda:2': there is no such GPU; the last of 2 is 'cuda:1'"),
        (["cuda:1", "cuda:01"], "cuda", 2, "'cuda:1' is named twice"),
        (["cuda:0", "cuda:1"], "cpu", 0, "built for CPUs; write for example 'cpu:1'"),
        (["cpu:1", "cpu:8"], "cpu", 0, "of 'cpu:8': this machine has no core 8"),
        (["cpu:1", "auto"], "cpu", 0, "'auto' does not stand in a list"),
        (["cpu:1", "gpu"], "cpu", 0, "'gpu' must be 'cuda:N' or 'cpu:CORES'"),
        (["cpu:1", "cpu:5-2"], "cpu", 0, "of 'cpu:5-2': '5-2' is not a range"),
    ),
    ids=str,
)
def test_a_wrong_group_is_refused_by_key(settings: list[str], platform: str, num_gpus: int, hint: str) -> None:
    """Two drafts meet on one GPU, or the user is not told which device of the list is wrong."""
    with pytest.raises(ValueError) as caught:
        read_group(settings, platform, num_gpus)
    assert_refusal(str(caught.value), "draft_devices", settings, hint)


def test_the_first_gpu_after_the_targets_is_taken() -> None:
    """The draft lands on a GPU of the target, though one was free."""
    assert choose_gpus(4, {0, 1}, 1) == [DraftDevice("cuda:2")]
    assert choose_gpus(4, {1, 2}, 2) == [DraftDevice("cuda:0"), DraftDevice("cuda:3")]


@pytest.mark.parametrize("num_gpus", (0, 1, 2))
def test_no_gpu_left_is_refused(num_gpus: int) -> None:
    """The draft and the target share a GPU without the user knowing."""
    with pytest.raises(ValueError, match=f"draft_device.*2 of {num_gpus} .*leaves none for 1 draft;"):
        choose_gpus(num_gpus, {0, 1}, 1)


@pytest.mark.parametrize(
    ("gpu_id", "visible", "index"),
    (("1", None, 1), ("3", "", 3), ("4", "4,5", 0), ("0", "1, 0", 1), (" 0", "1, 0", 1), ("GPU-b", "GPU-a,GPU-b", 1)),
)
def test_a_gpu_by_its_id(gpu_id: str, visible: str | None, index: int) -> None:
    """The draft takes the GPU that has the id's number among those it sees: none, or another's."""
    assert gpu_index(gpu_id, visible) == index


def test_a_gpu_that_is_not_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="the GPU '0', but CUDA_VISIBLE_DEVICES is '4,5'"):
        gpu_index("0", "4,5")


def test_too_few_gpus_are_refused() -> None:
    """Drafts of two ranks meet on one GPU."""
    with pytest.raises(ValueError, match="4 of 5 visible GPUs and leaves 1 for 2 drafts"):
        choose_gpus(5, range(4), 2)


def test_a_gpu_of_the_target_needs_a_size() -> None:
    """The draft takes 85 % of what is free there while the target loads, which then has no memory."""
    drafts = [DraftDevice("cuda:2"), DraftDevice("cuda:1")]
    check_shared_gpus(drafts, {0}, None)
    check_shared_gpus(drafts, {0, 1}, 1 << 30)
    with pytest.raises(ValueError, match="draft_kv_cache_memory_bytes'\\] is None.* on 'cuda:1'"):
        check_shared_gpus(drafts, {0, 1}, None)


@pytest.mark.parametrize(
    ("facts", "num_ranks", "visible", "taken"),
    (
        ({}, 2, None, {0, 1, 2, 3}),
        ({"local_world_size": 1}, 1, None, {0}),  # of two machines
        ({"assigned_physical_gpu_ids": [2, 5]}, 1, None, {2, 5}),
        ({"assigned_physical_gpu_ids": [5, 7]}, 1, "4,5,6,7", {1, 3}),
        ({"assigned_physical_gpu_ids": [5, 7, 4]}, 1, "4,5,6,7", {1, 3}),  # the third is not used
        ({"assigned_physical_gpu_ids": [5, 9]}, 1, "4,5,6,7", {1}),  # which vLLM refuses
        ({"assigned_physical_gpu_ids": [4, 5, 6, 7]}, 2, "4,5,6,7", {0, 1, 2, 3}),
        ({"data_parallel_size": 4, "data_parallel_index": 1}, 1, None, {0, 1}),  # each rank with GPUs of its own
        ({"data_parallel_size": 4, "data_parallel_index": 3, "data_parallel_rank_local": 1}, 1, None, {2, 3}),
    ),
)
def test_gpus_of_the_target(
    facts: dict, num_ranks: int, visible: str | None, taken: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft takes a GPU of the target though one is free, or is refused one that is."""
    from vllm.platforms import current_platform

    from vllm_ssd.integration.start_checks import _target_gpus

    monkeypatch.setattr(type(current_platform), "device_control_env_var", "GPUS_TO_SEE", raising=False)
    if visible is not None:
        monkeypatch.setenv("GPUS_TO_SEE", visible)
    assert _target_gpus(types.SimpleNamespace(**{"world_size": 2, **facts}), num_ranks) == taken


@pytest.mark.parametrize(
    ("facts", "device"),
    (
        ({}, "cuda:2"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2, "world_size": 1}, "cuda:2|cuda:3"),
        ({"data_parallel_size": 2, "node_rank": 1}, "cuda:2"),  # the rank of this node, started by vLLM
        ({"nnodes": 2, "node_rank_within_dp": 1, "world_size": 16, "local_world_size": 8}, "auto"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0, "world_size": 8}, "auto"),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, None),
        ({"data_parallel_size": 2, "data_parallel_rank_local": 0}, None),
    ),
)
def test_the_gpu_of_a_machine_of_four(facts: dict, device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines without a draft need a GPU for one, or a rank takes a GPU that another rank's target has."""
    from vllm import platforms

    from vllm_ssd.config import SaguaroConfig
    from vllm_ssd.integration.start_checks import _draft_device

    gpus = types.SimpleNamespace(is_cpu=lambda: False, device_type="cuda", device_control_env_var="GPUS_TO_SEE")
    monkeypatch.setattr(platforms, "current_platform", gpus, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    plain = {"world_size": 2, "use_ray": False, "data_parallel_size": 1, "data_parallel_size_local": 1}
    parallel, config = types.SimpleNamespace(**{**plain, **facts}), SaguaroConfig("draft", 3)
    if device is not None:
        assert _draft_device(config, parallel) == device
        return
    with pytest.raises(ValueError, match="started one by one"):
        _draft_device(config, parallel)


@pytest.mark.parametrize(
    ("bind", "affinity", "cores"),
    (
        ("0-5", range(8), (6, 7)),
        ("0-2|4-6", range(8), (3, 7)),
        ("0,2,4", range(8), (1, 3, 5, 6, 7)),
        ("auto", range(8), (7,)),
        ("auto", (0, 1), (2, 3, 4, 5, 6, 7)),
        ("nobind", (4, 5, 6, 7), (0, 1, 2, 3)),
        ("0-3", (0, 1), (4, 5, 6, 7)),
        ("", range(8), (7,)),
    ),
)
def test_the_cores_that_the_target_leaves(bind: str, affinity: tuple[int, ...], cores: tuple[int, ...]) -> None:
    """The draft shares cores with the target, or leaves cores idle."""
    assert choose_cores(bind, affinity) == DraftDevice("cpu", cores)


def test_no_core_left_is_refused_with_the_variable_to_set() -> None:
    """A draft without cores fails in its own process."""
    with pytest.raises(ValueError, match=r"draft_device.*VLLM_CPU_OMP_THREADS_BIND=0-6"):
        choose_cores("0-7", range(8))


def test_cores_with_gaps_are_named_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that the machine has the very core that it lacks."""
    monkeypatch.setattr(devices, "online_cores", lambda: (0, 1, 2, 4, 6))
    with pytest.raises(ValueError, match="no core 3; it has 0-2,4,6"):
        read_draft_device("cpu:3", "cpu", 0)


def test_a_machine_with_one_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one core the draft slows the target down instead of helping it."""
    monkeypatch.setattr(devices, "online_cores", lambda: (0,))
    with pytest.raises(ValueError, match="one core"):
        choose_cores("0", (0,))
