"""Where a shared draft listens, and who may talk to it: addresses and CURVE keys.

`ipc://` and loopback addresses are open to this machine only; anything else needs keys. A folder
of keys holds two pairs, of the draft and of its targets, as pyzmq writes them:

    draft.key_secret     stays with the draft
    draft.key            goes to the targets: whom they talk to
    target.key_secret    goes to the targets: who they are
    target.key           stays with the draft: whom it admits
"""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

_KINDS = "write 'ipc:///path/of/a/socket' or 'tcp://host:port'"
_LONGEST_PATH = 100  # bytes; Unix sockets allow 107


def check_address(address: str, has_keys: bool) -> None:
    """Raise `ValueError` with what is wrong and what would be right."""
    kind, _, rest = str(address).partition("://")
    if kind == "ipc":
        if not rest.startswith("/") or not rest.isprintable() or rest.endswith("/") or os.path.isdir(rest):
            raise ValueError("it has no absolute path of a socket; write for example 'ipc:///run/user/1000/draft'")
        if len(rest.encode()) > _LONGEST_PATH:
            raise ValueError(
                f"its path is longer than the {_LONGEST_PATH} bytes of a Unix socket; choose a shorter one"
            )
        return
    if kind != "tcp":
        raise ValueError(f"it must be of kind ipc or tcp; {_KINDS}")
    host, _, port = rest.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"it must name a host and a port from 1 to 65535; {_KINDS}")
    if not has_keys and not _is_loopback(host.strip("[]")):
        raise ValueError(
            f"{host} can be reached over the network, which needs keys (`vllm-ssd keygen`); "
            "without them use 'tcp://127.0.0.1:PORT' or 'ipc:///path'"
        )


def _is_loopback(host: str) -> bool:
    """Whether the host is this machine only. `*` and names that do not resolve are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


# ---- keys ----


def make_keys(folder: Path) -> list[Path]:
    """Write both pairs into a folder, which is made if need be; returns the files.

    Raises `ValueError` if there are keys already: whoever has them would be locked out.
    """
    from zmq import auth

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if there := sorted(folder.glob("*.key*")):
        raise ValueError(f"{folder} holds keys already ({there[0].name}); choose another folder or delete them")
    written: list[Path] = []
    with _private_files():
        for name in ("draft", "target"):
            written += map(Path, auth.create_certificates(folder, name))
    return written


@dataclass(frozen=True)
class Keys:
    """What one side needs: Z85 text. Secrets are those of its own side only."""

    draft: bytes  # public
    target: bytes  # public
    draft_secret: bytes | None = None
    target_secret: bytes | None = None


def new_keys() -> Keys:
    """Both pairs, in memory only."""
    draft, draft_secret = zmq.curve_keypair()
    target, target_secret = zmq.curve_keypair()
    return Keys(draft, target, draft_secret, target_secret)


def drafts_keys(folder: str | Path) -> Keys:
    """What the draft needs of a folder. Raises `ValueError` naming the file that is missing or bad."""
    public, secret = load_key(folder, "draft", secret=True)
    return Keys(public, load_key(folder, "target", secret=False)[0], draft_secret=secret)


def targets_keys(folder: str | Path) -> Keys:
    """What a target needs of a folder. Raises `ValueError` naming the file that is missing or bad."""
    public, secret = load_key(folder, "target", secret=True)
    return Keys(load_key(folder, "draft", secret=False)[0], public, target_secret=secret)


def load_key(folder: str | Path, name: str, secret: bool) -> tuple[bytes, bytes | None]:
    """Public and secret key of "draft" or "target". Raises `ValueError` naming the file that is missing or bad."""
    from zmq import auth

    file = Path(folder) / f"{name}.key{'_secret' if secret else ''}"
    try:
        public, private = auth.load_certificate(file)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        reason = "does not exist" if not file.exists() else f"is no key ({error})"
        raise ValueError(f"{file} {reason}; `vllm-ssd keygen` makes such folders") from None
    if secret and private is None:
        raise ValueError(f"{file} holds no secret key; `vllm-ssd keygen` makes such folders")
    if not _is_key(public) or (secret and not (_is_key(private) and zmq.curve_public(private) == public)):
        raise ValueError(f"{file} is damaged: what it holds is no CURVE key; `vllm-ssd keygen` makes such folders")
    return public, private


def _is_key(text: bytes) -> bool:
    """Whether this is the Z85 text of 32 bytes."""
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Files made while this holds can be read by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
