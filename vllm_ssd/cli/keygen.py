"""`vllm-ssd keygen`: keys for a draft that is reached over a network."""

import argparse
from pathlib import Path

from vllm_ssd.addresses import make_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        help="for draft.key, draft.key_secret, target.key, target.key_secret. draft.key_secret stays on the "
        "draft's machine; targets need draft.key and target.key_secret",
    )


def run(args: argparse.Namespace) -> int:
    if not args.folder:
        raise ValueError("FOLDER is empty; name a folder for the keys, '.' for this one")
    print(*make_keys(Path(args.folder)), sep="\n")
    return 0
