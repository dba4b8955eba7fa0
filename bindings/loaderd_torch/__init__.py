"""loaderd for PyTorch: a loader's batches as tensors."""

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    from loaderd.errors import install_hint

    raise ModuleNotFoundError(
        f"loaderd_torch needs PyTorch: {install_hint('torch')}, or the build of torch for your GPU", name="torch"
    ) from None

from loaderd_torch.rank_shard import shard
from loaderd_torch.tensors import batches

__all__ = ["batches", "shard"]


def __dir__() -> list[str]:
    return __all__
