"""The actors: a Server, which watches over one server, and a Manager, which keeps the servers of one name going.

::

    serve()  ──makes──►  Manager ──makes──►  Server  (one a node: tied to it; n: in a bundle of a placement group)
                            │    ◄──state──     │
    connect(), status() ◄───┘                   └── loaderd serve

All are detached, and Ray restarts them without limit. A Manager is at the cluster's head, and has nothing to lose: it
finds its Servers by their names. With one server per node, it makes one for each new node, and drops those of nodes
that are gone. With n servers, Ray keeps them on n different nodes: when a node goes, its bundle moves to another one,
and the actor with it.
"""

from __future__ import annotations

import os
import ssl
import sys
import threading
import time
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import ray
import urllib3
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from loaderd_ray.serve_process import ServerProcess
from loaderd_ray.spec import NAMESPACE, ServerState, Spec, server_name

_LOOK_EVERY_S = 0.5
_SILENT_S = 3.0
_REPORT_TIMEOUT_S = 5.0


class Server:
    """Watches over a ``loaderd serve`` on the node that it is on."""

    def __init__(self, spec: Spec, key: str) -> None:
        context = ray.get_runtime_context()
        self._machine = ray.util.get_node_ip_address()
        self._spec = spec
        self._state = ServerState(key, context.get_node_id(), self._machine, actor_pid=os.getpid())
        self._process = ServerProcess(self._arguments(spec), spec.token)

    def _arguments(self, spec: Spec) -> list[str]:
        host = self._machine if spec.is_open else "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        arguments = [*spec.targets, "--listen", f"{host}:{spec.port}", "--workers", str(spec.cpus)]
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            if (value := getattr(spec, name)) is not None:
                arguments += [f"--{name.replace('_', '-')}", value]
        return [*arguments, *(["--insecure"] if spec.insecure else []), *spec.options]

    def state(self) -> ServerState:
        process = self._process
        return replace(
            self._state, address=process.address, pid=process.pid, restarts=process.restarts, error=process.error
        )

    def state_and_report(self) -> ServerState:
        state = self.state()
        try:
            return replace(state, report=None if state.address is None else _report(state.address, self._spec))
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:
            return replace(state, error=state.error or f"it does not say how it is: {error}")

    def stop(self) -> None:
        self._process.stop()


def _report(address: str, spec: Spec) -> Any:
    """What a server of this node says of itself. It must show the certificate that it was started with.

    Raises OSError, ValueError, and urllib3's HTTPError.
    """
    tls: dict[str, Any] = {}
    if spec.tls_cert is not None:
        pem = Path(spec.tls_cert).read_text().partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER
        begin = pem.index(ssl.PEM_HEADER)
        digest = sha256(ssl.PEM_cert_to_DER_cert(pem[begin:])).hexdigest()
        tls = {"cert_reqs": ssl.CERT_NONE, "assert_fingerprint": digest}
        tls |= {"cert_file": spec.tls_cert, "key_file": spec.tls_key}  # tls_client_ca may ask for one, too
    with urllib3.PoolManager(**tls) as pool:
        headers = {"Authorization": f"Bearer {spec.token}"}
        answer = pool.request("GET", f"{address}/v1", headers=headers, timeout=_REPORT_TIMEOUT_S, retries=False)
    if answer.status != 200:
        raise OSError(f"{address} answers {answer.status}")
    return answer.json()


@dataclass(eq=False)
class _ManagedServer:
    """A wanted server. ``pending``: the call that it has not answered; ``answered_s``: when it last did."""

    actor: Any
    state: ServerState
    pending: Any = None
    answered_s: float = 0.0


class Manager:
    """See the module's docstring. ``group``: if n servers are wanted, their placement group; it has n bundles."""

    def __init__(self, spec: Spec, group: PlacementGroup | None) -> None:
        self._spec = spec
        self._group = group
        self._servers: dict[str, _ManagedServer] = {}
        self._states: list[ServerState] = []
        self._has_looked = threading.Event()
        threading.Thread(target=self._keep_looking, name="loaderd-manager", daemon=True).start()

    def spec(self) -> Spec:
        return self._spec

    def states(self) -> list[ServerState]:
        """The state of each server that there must be, once the Manager has looked for the first time."""
        self._has_looked.wait()
        return self._states

    def _keep_looking(self) -> None:
        while True:
            try:
                self._look()
            except ray.exceptions.RayError as error:  # the cluster's head is away, or a node is just going
                sys.stderr.write(f"the servers of {self._spec.name!r} cannot be looked after: {error}\n")
            time.sleep(_LOOK_EVERY_S)

    def _look(self) -> None:
        wanted = self._wanted()
        for key in wanted.keys() - self._servers.keys():
            self._servers[key] = _ManagedServer(
                self._make(key, wanted[key]), ServerState(key, error="Ray has not placed its actor on a node yet")
            )
        for key in self._servers.keys() - wanted.keys():
            ray.kill(self._servers.pop(key).actor)
        for server in self._servers.values():
            server.pending = server.pending or server.actor.state.remote()
        calls = [server.pending for server in self._servers.values()]
        ray.wait(calls, num_returns=max(1, len(calls)), timeout=0.5)
        for server in self._servers.values():
            self._take_answer(server)
        self._states = [server.state for _, server in sorted(self._servers.items())]
        self._has_looked.set()

    def _take_answer(self, server: _ManagedServer) -> None:
        now_s = time.monotonic()
        answered, _ = ray.wait([server.pending], timeout=0)
        is_lost = bool(server.answered_s) and now_s - server.answered_s > _SILENT_S
        if answered:
            server.pending = None
            try:
                server.state, server.answered_s, is_lost = ray.get(answered[0]), now_s, False
            except ray.exceptions.RayError:  # it has died, and Ray starts it again
                is_lost = True
        if is_lost:
            server.state = replace(server.state, address=None, error="its actor does not answer")

    def _wanted(self) -> dict[str, Any]:
        """For each server that there must be, by key: the scheduling strategy that says where it belongs."""
        if self._group is not None:
            return {
                str(bundle): PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
                for bundle in range(self._group.bundle_count)
            }
        return {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes_for(self._spec)}

    def _make(self, key: str, place: Any) -> Any:
        """The Server of that key: the existing actor, or a new one at ``place``."""
        options = {"lifetime": "detached", "max_restarts": -1, "num_cpus": self._spec.cpus}
        name = server_name(self._spec.name, key)
        made = ray.remote(Server).options(
            name=name, namespace=NAMESPACE, get_if_exists=True, scheduling_strategy=place, **options
        )
        return made.remote(self._spec, key)


def nodes_for(spec: Spec) -> list[str]:
    """The ids of the nodes that are alive and have enough cores for a server."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= spec.cpus]
