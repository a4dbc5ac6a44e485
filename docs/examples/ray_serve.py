"""A target with saguaro behind Ray Serve LLM, with OpenAI's routes.

    python ray_serve.py Qwen/Qwen3-32B Qwen/Qwen3-0.6B --tensor-parallel-size 4

runs it on the Ray cluster of this machine until Ctrl-C; `--help` has the other options. For
`serve run` or `serve deploy`, `build` is the application builder:

    serve run --name saguaro ray_serve:build target=Qwen/Qwen3-32B draft=Qwen/Qwen3-0.6B tensor_parallel_size=4
"""

import argparse
import json
import signal
import threading

from ray import serve
from ray.serve import Application
from ray.serve.llm import LLMConfig, build_openai_app


def llm_config(target: str, draft: str, tensor_parallel_size: int = 1, name: str = "target", **engine) -> LLMConfig:
    """One deployment. `name`: what clients call the model. `engine`: more of vLLM's engine arguments."""
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": target},
        # A bundle for each rank of the target and one for the draft. Without this Ray Serve makes the ranks' only,
        # as it does with `bundle_per_worker`, and the start is refused.
        placement_group_config={"bundles": [{"GPU": 1}] * (tensor_parallel_size + 1), "strategy": "PACK"},
        engine_kwargs={
            "tensor_parallel_size": tensor_parallel_size,
            "speculative_config": {"method": "saguaro", "model": draft, "num_speculative_tokens": 5},
            **engine,
        },
        deployment_config={"num_replicas": 1},  # each replica has a placement group, and so a draft, of its own
    )


def build(options: dict[str, str]) -> Application:
    """The application; `options` as `llm_config` takes them, numbers and the like written as in JSON."""
    return build_openai_app({"llm_configs": [llm_config(**{name: _value(text) for name, text in options.items()})]})


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    """Serve until a signal ends it, then leave nothing behind."""
    parser = argparse.ArgumentParser(description="A target with saguaro behind Ray Serve LLM.")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as a JSON object")
    args = parser.parse_args()
    serve.start(http_options={"host": args.host, "port": args.port})
    app = build_openai_app(
        {"llm_configs": [llm_config(args.target, args.draft, args.tensor_parallel_size, **args.engine)]}
    )
    try:
        serve.run(app, name="saguaro")  # returns when the model is loaded
        print(f"OpenAI's routes are at http://{args.host}:{args.port}/v1", flush=True)
        over = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())
        over.wait()
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
