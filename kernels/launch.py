"""What the wrappers of all kernels share: where a call runs, and the checks of its tensors."""

from collections.abc import Sequence

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BACKENDS = ("triton", "torch")


def runs_kernel(backend: str | None, tensor: torch.Tensor) -> bool:
    """Whether the Triton kernel runs (or the twin). `backend` None: the kernel on CUDA, the twin elsewhere.

    Raises `ValueError` for any other backend than `BACKENDS`.
    """
    if backend is None:
        return tensor.is_cuda
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))} or None.")
    return backend == "triton"


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Raise `ValueError`, in one sentence, unless the tensor is what a kernel expects.

    `shape`: None where any size is right. `contiguous` False asks for a dense last dimension only.
    """
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, tensor.shape)):
        right = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({right}).")
    if tensor.dtype not in dtypes:
        right = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it must be {right}.")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}, as the other tensors.")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous.")
    if not contiguous and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be dense.")


def check_rows_apart(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` if rows that a kernel writes share memory, as those of an expanded tensor do."""
    reach = 1  # elements from the first to the last of the dimensions that are packed closer
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1):
        if stride < reach:
            raise ValueError(f"{name} has strides {tensor.stride()}; its rows must not share memory.")
        reach += (size - 1) * stride


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << max(count - 1, 0).bit_length())
