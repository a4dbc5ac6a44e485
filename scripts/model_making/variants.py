"""Models made of other models: deeper ones that say the same, and random ones."""

import json
from pathlib import Path

import torch

from model_making.folder import Weights, copy_all_but_weights, load_weights, new_folder, save_weights


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
