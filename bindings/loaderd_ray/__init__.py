"""loaderd on a Ray cluster: servers on its nodes, loaders for its trainings, passes over many shards as tasks."""

try:
    import ray as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    from loaderd.errors import install_hint

    raise ModuleNotFoundError(f"loaderd_ray needs Ray: {install_hint('ray')}", name="ray") from None

from loaderd_ray.loaders import connect, load, save
from loaderd_ray.serving import serve, status, stop
from loaderd_ray.shard_tasks import Findings, index, verify
from loaderd_ray.spec import ServerState

__all__ = [
    "Findings",
    "ServerState",
    "connect",
    "index",
    "load",
    "save",
    "serve",
    "status",
    "stop",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
