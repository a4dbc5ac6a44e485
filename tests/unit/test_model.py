"""The forward over the slot pool equals the plain forward of `transformers`, on tiny random models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft import batch, light_decoder
from vllm_ssd.draft.batch import FlatBatch, Group, flatten
from vllm_ssd.draft.light_decoder import LightDecoder
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.pool_attention import NAME, PoolDecoder

NUM_SLOTS, VOCABULARY, CONTEXT = 128, 97, 64
CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LIGHT = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with one KV head": {"num_key_value_heads": 1},
    "llama with yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},  # with biases of q, k and v
    "qwen3": {"head_dim": 16},  # with norms of q and k
}
GENERAL = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "mistral with a window": {"sliding_window": 8},
    "gemma2": {"attn_logit_softcapping": 1.0, "sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16},
}


def tiny(name: str, **changes) -> PreTrainedModel:
    """A random model, in float32, whose biases and norms are not the ones they start with."""
    torch.manual_seed(0)
    settings = {**SHAPE, **LIGHT.get(name, {}), **GENERAL.get(name, {}), **changes}
    if name == "gpt2":
        settings = {**GENERAL[name], "vocab_size": VOCABULARY, "initializer_range": 0.3}
    config = AutoConfig.for_model(name.partition(" ")[0], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after each token, by `transformers` alone: [length, vocabulary]."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    model.set_attn_implementation(NAME)
    return logits


def causal_group(tokens: list[int], known: int, slots: np.ndarray) -> Group:
    """The tokens after the first `known` ones, over the slots of all."""
    return batch.causal_group(tokens[known:], known, slots[: len(tokens)], slots[known : len(tokens)])


def empty_pools(model: PreTrainedModel, num_slots: int = NUM_SLOTS) -> list[torch.Tensor]:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # What was never written must not matter, as long as it is finite.
    return [torch.full((2 * heads, num_slots, size), 1e4, dtype=model.dtype) for _ in range(config.num_hidden_layers)]


def assert_equals_plain(decoder: LightDecoder | PoolDecoder, model: PreTrainedModel) -> None:
    """Three sequences of different lengths: read in two chunks, then a tree step with two branches of one."""
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, VOCABULARY, n).tolist() for n in (3, 17, 9)]
    slots = generator.permutation(NUM_SLOTS).reshape(4, -1)  # of each sequence, and of branches
    pools = empty_pools(model)

    def forward(groups: list[Group], rows: np.ndarray | None = None) -> torch.Tensor:
        with torch.inference_mode():
            return decoder.forward(flatten(groups, CPU, rows), pools)

    first = forward([causal_group(tokens[:2], 0, slots[i]) for i, tokens in enumerate(sequences)])
    rest = forward([causal_group(tokens, 2, slots[i]) for i, tokens in enumerate(sequences)])
    expected = [plain_logits(model, tokens) for tokens in sequences]
    assert torch.allclose(first, torch.cat([logits[:2] for logits in expected]), atol=1e-3)
    assert torch.allclose(rest, torch.cat([logits[2:] for logits in expected]), atol=1e-3)

    trunk, above = sequences[1], np.array([5, 17])  # branches leave the trunk at its 5th token and at its end
    tree = Group([11, 22], above, slots[3][:2], slots[1][:17], above, slots[3][:2, None])
    tokens = [*sequences[0], 33]
    for groups, rows in (([tree], None), ([tree, causal_group(tokens, 3, slots[0])], np.array([2, 0, 1]))):
        logits = forward(groups, rows)
        if rows is not None:
            assert torch.allclose(logits[0], plain_logits(model, tokens)[-1], atol=1e-3)
            logits = logits[1:]
        assert torch.allclose(logits[0], plain_logits(model, [*trunk[:5], 11])[-1], atol=1e-3)
        assert torch.allclose(logits[1], plain_logits(model, [*trunk, 22])[-1], atol=1e-3)


@pytest.mark.parametrize("name", LIGHT)
def test_the_light_forward_equals_the_plain_one(name: str) -> None:
    """The light forward of a recognised model drafts from other logits than the model's own."""
    model = tiny(name)
    decoder = light_decoder.try_build(model)
    assert isinstance(decoder, LightDecoder)
    assert_equals_plain(decoder, model)


@pytest.mark.parametrize("name", [*LIGHT, *GENERAL])
def test_the_general_forward_equals_the_plain_one(name: str) -> None:
    """Our attention inside a model of `transformers` gives other logits than its own."""
    model = tiny(name)
    assert_equals_plain(PoolDecoder(model), model)


@pytest.mark.parametrize(
    ("name", "changes"),
    (
        *((name, {}) for name in GENERAL),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": CONTEXT - 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ),
)
def test_other_shapes_are_not_taken_for_light_ones(name: str, changes: dict) -> None:
    """A model that is not plain pre-norm, rotary and SwiGLU is run as if it were."""
    assert light_decoder.try_build(tiny(name, **changes)) is None


def test_a_window_as_long_as_the_context_is_none() -> None:
    """A model whose sliding window cuts nothing takes the slow path."""
    model = tiny("mistral", sliding_window=CONTEXT)
    assert_equals_plain(light_decoder.try_build(model), model)


def test_a_replaced_projection_is_noticed() -> None:
    """A quantised or adapted layer is run with the weights beneath it."""

    class Adapted(torch.nn.Linear):
        pass

    model = tiny("llama")
    model.model.layers[1].mlp.up_proj = Adapted(32, 48, bias=False)
    assert light_decoder.try_build(model) is None


# ---- DraftModel ----


def saved(model: PreTrainedModel, folder: Path, **options) -> DraftModel:
    model.save_pretrained(folder)
    config = SaguaroConfig(str(folder), 3, **{"draft_dtype": "float32", **options})
    return DraftModel(config, CPU, vocab_size=VOCABULARY)


@pytest.mark.parametrize("name", ("llama", "qwen3", "gpt2"))
def test_a_loaded_model_runs_over_its_own_pools(name: str, tmp_path: Path) -> None:
    """Loading, the shape of the pools or the warm-up break for one of the two paths."""
    model = tiny(name)
    draft = saved(model, tmp_path)
    assert draft.allocate_kv_cache(None, most_useful=NUM_SLOTS) == NUM_SLOTS
    draft.warm_up()
    tokens = [5, 6, 7, 8]
    with torch.inference_mode():
        batch: FlatBatch = flatten([causal_group(tokens, 0, np.arange(NUM_SLOTS))], CPU)
        assert torch.allclose(draft.forward(batch), plain_logits(model, tokens), atol=1e-3)
    assert draft.max_length == CONTEXT
    assert draft.dtype == torch.float32


def test_a_short_context_is_warmed_up(tmp_path: Path) -> None:
    """The warm-up asks for positions that the draft does not have."""
    model = tiny("llama", max_position_embeddings=20)
    draft = saved(model, tmp_path)
    draft.allocate_kv_cache(None, most_useful=NUM_SLOTS)
    draft.warm_up()
    tokens = list(range(20))
    with torch.inference_mode():
        logits = draft.forward(flatten([causal_group(tokens, 0, np.arange(NUM_SLOTS))], CPU))
    assert torch.allclose(logits, plain_logits(model, tokens), atol=1e-3)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_the_dtype_is_the_one_asked_for(dtype: str, tmp_path: Path) -> None:
    """The option draft_dtype changes nothing."""
    draft = saved(tiny("llama"), tmp_path, draft_dtype=dtype)
    draft.allocate_kv_cache(None, most_useful=16)
    draft.warm_up()
    assert draft.dtype == getattr(torch, dtype)


def test_the_memory_asked_for_is_the_memory_taken(tmp_path: Path) -> None:
    """draft_kv_cache_memory_bytes is exceeded, or a cache that holds no token passes."""
    draft = saved(tiny("llama"), tmp_path)
    slot_bytes = 2 * 2 * 2 * 8 * 4  # k and v, layers, KV heads, head size, float32
    assert draft.allocate_kv_cache(100 * slot_bytes + slot_bytes // 2, most_useful=10) == 100
    with pytest.raises(ValueError, match="draft_kv_cache_memory_bytes"):
        draft.allocate_kv_cache(slot_bytes - 1, most_useful=10)
