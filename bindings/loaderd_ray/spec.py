"""What servers of a name are to do, what is known of each of them, and what their actors are called."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from loaderd.errors import OptionError
from loaderd.options import as_count, is_count, require

NAMESPACE = "loaderd"
"""Ray's namespace of all actors here, so that every job finds them."""

PerNode = Literal["per-node"]


@dataclass(frozen=True)
class Spec:
    """The arguments of :func:`loaderd_ray.serve`, checked. Raises OptionError."""

    targets: tuple[str, ...]
    name: str
    servers: PerNode | int
    cpus: int
    token: str = field(repr=False)
    tls_cert: str | None
    tls_key: str | None
    tls_client_ca: str | None
    insecure: bool
    port: int
    options: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.targets) > 0, "what is served", "at least one mypackage.module:dataset", self.targets)
        for target in self.targets:
            is_target = isinstance(target, str) and all(target.partition(":"))
            require(is_target, "a data set", "named as mypackage.module:dataset", target)
        is_name = isinstance(self.name, str) and bool(self.name) and "/" not in self.name
        require(is_name, "name", "text without a slash", self.name)
        is_number = is_count(self.servers) or (isinstance(self.servers, str) and self.servers == "per-node")
        require(is_number, "servers", '"per-node" or a positive integer', self.servers)
        as_count(self.cpus, "cpus")
        as_count(self.port, "port", "from 0 (any) to 65535", 0, (1 << 16) - 1)

    @property
    def is_open(self) -> bool:
        """Whether servers listen for other machines, and not at loopback alone."""
        return self.tls_cert is not None or self.insecure

    @property
    def datasets(self) -> list[str]:
        """The names of the data sets that are served."""
        return [target.partition(":")[2] for target in self.targets]

    def differences(self, other: Spec) -> list[str]:
        """The names of the arguments in which ``other`` differs, without ``token``, which may be made at random."""
        return [
            each.name
            for each in fields(self)
            if each.name != "token" and getattr(self, each.name) != getattr(other, each.name)
        ]


@dataclass(frozen=True)
class ServerState:
    """The state of a server, as :func:`loaderd_ray.status` returns it."""

    key: str
    """Which server it is: with one per node, the id of its node; else a number from 0."""
    node: str = ""
    """The node's id; empty: its actor is not placed yet."""
    machine: str = ""
    """The node's IP address."""
    address: str | None = None
    """Where consumers find it, such as https://10.0.0.7:40121; None: it starts, or does not answer."""
    pid: int | None = None
    """The process of ``loaderd serve``; None: another one is about to be started."""
    actor_pid: int | None = None
    """The process of the actor that watches over it."""
    restarts: int = 0
    """How many times its process was started again since the actor began."""
    error: str = ""
    """The last words of the process before this one, or why nothing is known."""
    report: dict[str, Any] | None = field(default=None, repr=False)
    """What it says of itself, as `loaderd status --json`; only in answers of ``status``."""


def manager_name(name: str) -> str:
    """The name of the actor that manages the servers called ``name``."""
    return f"{name}/manager"


def server_name(name: str, key: str) -> str:
    """The name of the actor that watches over the server ``key``."""
    return f"{name}/server/{key}"


def datasets_of(spec: Spec, wanted: str | None) -> str:
    """The name of the data set that is meant. Raises OptionError where it is not clear which, or is not served."""
    if wanted is None and len(spec.datasets) == 1:
        return spec.datasets[0]
    if wanted not in spec.datasets:
        raise OptionError(f"dataset must be one of those that {spec.name!r} serves, {spec.datasets}, got {wanted!r}")
    return wanted
