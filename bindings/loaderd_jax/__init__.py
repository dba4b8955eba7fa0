"""loaderd for JAX: a loader's batches as JAX arrays."""

try:
    import jax as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    from loaderd.errors import install_hint

    raise ModuleNotFoundError(
        f"loaderd_jax needs JAX: {install_hint('jax')}, or the build of jax for your accelerator",
        name="jax",
    ) from None

from loaderd_jax.arrays import batches
from loaderd_jax.process_shard import shard

__all__ = ["batches", "shard"]


def __dir__() -> list[str]:
    return __all__
