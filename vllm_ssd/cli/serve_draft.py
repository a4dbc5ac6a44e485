"""`vllm-ssd serve-draft`: one draft for several targets, each started with `draft_address`."""

import argparse
import logging
import os
import signal
import threading

from vllm_ssd.config import SaguaroConfig

_LOG_FORMAT = "(saguaro draft pid=%(process)d) %(levelname)s %(asctime)s %(message)s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the draft model: a local folder or a name on the Hugging Face hub")
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="ipc:///path/of/a/socket or tcp://host:port")
    parser.add_argument("--device", required=True, help="'cuda:N' or 'cpu:CORES', for example cuda:1 or cpu:2-5")
    parser.add_argument(
        "--keys", metavar="FOLDER", help="made by `vllm-ssd keygen`; needed for tcp beyond this machine"
    )
    parser.add_argument("--dtype", default="auto", help="'auto', 'float32', 'bfloat16' or 'float16' (default: auto)")
    parser.add_argument("--kv-cache-memory-bytes", type=int, metavar="N", help="default: a share of the free memory")
    parser.add_argument("--max-targets", type=int, default=16, metavar="N", help="targets at a time (default: 16)")
    parser.add_argument("--revision", help="revision of the model on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model run code from its repository")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status."""
    logging.basicConfig(
        level=os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper(), format=_LOG_FORMAT, datefmt="%m-%d %H:%M:%S"
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server, hub = make_server(_config(args), args.listen, args.keys, args.max_targets)
    except (OSError, ValueError) as error:
        raise ValueError(_first_line(error)) from error
    try:
        server.run(stop)
    finally:
        hub.close()
    return 0


def _config(args: argparse.Namespace) -> SaguaroConfig:
    is_path = args.model.startswith((os.path.sep, ".", "~"))
    if is_path and not os.path.isdir(os.path.expanduser(args.model)):
        raise ValueError(f"MODEL is {args.model!r}; there is no such folder")
    if args.max_targets < 1:
        raise ValueError(f"--max-targets is {args.max_targets}; it must be at least 1")
    if args.kv_cache_memory_bytes is not None and args.kv_cache_memory_bytes < 1 << 20:
        raise ValueError(f"--kv-cache-memory-bytes is {args.kv_cache_memory_bytes}; it must be at least 1048576")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    if args.dtype not in dtypes:
        raise ValueError(f"--dtype is {args.dtype!r}; it must be one of {', '.join(dtypes)}")
    return SaguaroConfig(
        model=args.model,
        num_speculative_tokens=1,  # each target says its own
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        draft_device=args.device,
        draft_dtype=args.dtype,
        draft_kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )


def make_server(config: SaguaroConfig, address: str, keys: str | None, max_targets: int):
    """Bind the address, load the model on `config.draft_device`: a `SharedServer` and its `Hub`.

    Raises `ValueError` or `OSError` for what cannot be had.
    """
    from vllm_ssd.addresses import check_address, drafts_keys
    from vllm_ssd.draft.hub import Hub
    from vllm_ssd.draft.shared_server import load

    try:
        check_address(address, keys is not None)
    except ValueError as error:
        raise ValueError(f"--listen is {address!r}; {error}") from None
    device = _device(config.draft_device)
    if device.cores:
        os.environ["OMP_NUM_THREADS"] = str(len(device.cores))
        os.sched_setaffinity(0, device.cores)
    # First: it is quick, and a taken address need not wait for the model.
    hub = Hub(address, None if keys is None else drafts_keys(keys))
    try:
        return load(config, device, hub, max_targets), hub
    except OSError as error:  # of transformers: the address is bound
        hub.close()
        raise ValueError(f"MODEL is {config.model!r}, which cannot be read ({_first_line(error)})") from error
    except BaseException:
        hub.close()
        raise


def _device(setting: str):
    from vllm_ssd.devices import read_draft_device

    platform, num_gpus = "cpu", 0
    if setting.startswith("cuda"):
        import torch

        platform, num_gpus = "cuda", torch.cuda.device_count()
    try:
        device = read_draft_device(setting, platform, num_gpus)
    except ValueError as error:
        raise ValueError(str(error).replace("speculative_config['draft_device']", "--device")) from None
    if device is None:
        raise ValueError("--device is 'auto'; it must be 'cuda:N' or 'cpu:CORES', for example 'cuda:1' or 'cpu:2-5'")
    return device


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
