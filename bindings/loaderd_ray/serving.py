"""Servers on the nodes of a Ray cluster: start them, ask how they are, end them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from loaderd.errors import OptionError, ServerError
from loaderd_ray.actors import Manager, nodes_for
from loaderd_ray.spec import NAMESPACE, PerNode, ServerState, Spec, manager_name, server_name

_ANSWER_S = 20.0
_LOOK_EVERY_S = 0.2
_LOOK_FOR_OTHERS_S = 1.0
_MAX_FAILURES = 2
_HINT_NOT_SERVING = "Can their node import the module, and read the shards? `ray logs` has all that they said."
_HEAD = "node:__internal_head__"
"""A resource that Ray gives to the cluster's head."""


def serve(
    targets: str | Sequence[str],
    *,
    name: str,
    servers: PerNode | int = "per-node",
    cpus: int = 1,
    token: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_client_ca: str | None = None,
    insecure: bool = False,
    port: int = 0,
    options: Sequence[str] = (),
    timeout: float = 120.0,
) -> list[ServerState]:
    """Start servers of data sets on nodes of the cluster; they outlive this program, and run until :func:`stop`.

    - ``targets``: as ``loaderd serve`` takes them: ``"mypackage.datasets:train"``, or several. The module must be
      importable on the nodes (``runtime_env`` of ``ray.init``), and the shards readable there.
    - ``name``: what :func:`connect`, :func:`status` and :func:`stop` call them, in any job of this cluster.
    - ``servers``: ``"per-node"``: one on each node that has ``cpus`` cores, also on nodes that come later; or a
      number of servers, each on a node of its own.
    - ``cpus``: how many cores of its node each server takes, and how many processes it has.
    - ``token``: what servers ask of consumers; None: made at random. :func:`connect` knows it.
    - ``tls_cert``, ``tls_key``, ``tls_client_ca``: paths on the nodes. Without TLS servers listen at loopback, only
      for consumers of their own node; ``insecure=True``: for all, and anybody on the network can read the records.
    - ``port``: where each of them listens; 0: any that is free. ``options``: others of ``loaderd serve``.
    - ``timeout``: seconds until all of them must serve.

    Returns the states of the servers. Called again with the same arguments, it only waits until the existing servers
    serve. Raises OptionError, and ServerError where they do not come to serve; those that it started are ended then.
    """
    listed = (targets,) if isinstance(targets, str) else tuple(targets)
    spec = Spec(
        listed,
        name,
        servers,
        cpus,
        token or secrets.token_urlsafe(32),
        tls_cert,
        tls_key,
        tls_client_ca,
        insecure,
        port,
        tuple(options),
    )
    if not ray.is_initialized():
        ray.init()
    if _manager(name) is None:
        _check_reach(spec)
        states = _start(spec, timeout)
        if states is not None:
            return states
    manager = require_manager(name)
    _check_same(ray.get(manager.spec.remote(), timeout=_ANSWER_S), spec, token)
    return _wait_until_serving(manager, timeout)


def status(name: str) -> list[ServerState]:
    """The state of each server of a name, with its report. Raises ServerError where there are none."""
    states: list[ServerState] = ray.get(require_manager(name).states.remote(), timeout=_ANSWER_S)
    pending: dict[str, Any] = {}
    for state in states:
        with contextlib.suppress(ValueError):  # its actor does not exist just now
            pending[state.key] = ray.get_actor(server_name(name, state.key), NAMESPACE).state_and_report.remote()
    calls = list(pending.values())
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S) if calls else ([], [])
    return [_answer(state, pending.get(state.key), answered) for state in states]


def _answer(state: ServerState, pending: Any, answered: list[Any]) -> ServerState:
    if pending in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            with_report: ServerState = ray.get(pending)
            return with_report
    return replace(state, error=state.error or "its actor does not answer")


def stop(name: str) -> None:
    """End all servers of a name; their consumers are told. Does nothing where there are none."""
    manager = _manager(name)
    if manager is not None:
        ray.kill(manager)  # first, or it would make new Servers
    actors = []
    for each in list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE and each["name"].startswith(server_name(name, "")):
            with contextlib.suppress(ValueError):
                actors.append(ray.get_actor(each["name"], NAMESPACE))
    pending = [actor.stop.remote() for actor in actors]
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=_ANSWER_S)
    for actor in actors:
        ray.kill(actor)
    for number, group in placement_group_table().items():
        if group["name"].startswith(_groups_name(name)) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def require_manager(name: str) -> Any:
    """The Manager of the servers of a name. Raises ServerError where there is none."""
    if not ray.is_initialized():
        ray.init()
    manager = _manager(name)
    if manager is None:
        raise ServerError(
            f"no servers are called {name!r} on this Ray cluster",
            hint=f'Start them: loaderd_ray.serve("mypackage.datasets:train", name={name!r}).',
        )
    return manager


def _groups_name(name: str) -> str:
    """What the names of placement groups begin with."""
    return f"loaderd-{name}/"


def _manager(name: str) -> Any:
    try:
        return ray.get_actor(manager_name(name), NAMESPACE)
    except ValueError:
        return None


def _check_same(existing: Spec, wanted: Spec, token: str | None) -> None:
    differences = existing.differences(wanted) + ([] if token in (None, existing.token) else ["token"])
    if differences:
        raise OptionError(
            f"servers called {existing.name!r} are there already, with another {', '.join(differences)}",
            hint=f"loaderd_ray.stop({existing.name!r}) ends them; or choose another name.",
        )


def _check_reach(spec: Spec) -> None:
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if not nodes_for(spec):
        raise OptionError(f"cpus={spec.cpus} is more than any node of this cluster has")
    if spec.servers != "per-node" and not spec.is_open and len(machines) > 1:
        raise OptionError(
            f"servers={spec.servers} on {len(machines)} machines must be reached from others, and need TLS",
            hint="Give tls_cert and tls_key; or say insecure=True if everybody may read the data; or "
            'servers="per-node": then each is for its own node.',
        )


def _start(spec: Spec, timeout: float) -> list[ServerState] | None:
    """Start the servers, and wait until they serve; None: another program was first to start servers of that name."""
    group = started = None
    try:
        if spec.servers != "per-node":
            bundles = [{"CPU": spec.cpus}] * int(spec.servers)
            # Names of groups must differ, also from that of a program that does the same at this moment.
            names = {"name": _groups_name(spec.name) + secrets.token_hex(8), "lifetime": "detached"}
            group = placement_group(bundles, strategy="STRICT_SPREAD", **names)
            _wait_for_place(group, spec, timeout)
        options: dict[str, Any] = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}
        options["resources"] = {_HEAD: 0.001}  # the one node without which there is no cluster
        made = ray.remote(Manager).options(name=manager_name(spec.name), namespace=NAMESPACE, **options)
        started = made.remote(spec, group)
        return _wait_until_serving(started, timeout)
    except BaseException as error:
        other_was_first = _manager(spec.name) not in (None, started)
        if group is not None:  # it would outlive this program, with nobody to remove it
            remove_placement_group(group)
        if other_was_first and isinstance(error, (ServerError, ray.exceptions.ActorAlreadyExistsError)):
            return None
        if started is not None and not other_was_first:
            stop(spec.name)
        raise


def _wait_for_place(group: PlacementGroup, spec: Spec, timeout: float) -> None:
    """Until ``group`` has its nodes. Raises ServerError, also where another program has started the servers."""
    until_s = time.monotonic() + timeout
    while not group.wait(min(_LOOK_FOR_OTHERS_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() > until_s or _manager(spec.name) is not None:
            raise ServerError(
                f"servers={spec.servers} of cpus={spec.cpus}, each on a node of its own, could not be placed within "
                f"{timeout:g} s",
                hint="See `ray status`: which nodes are there, and what of them is taken.",
            )


def _wait_until_serving(manager: Any, timeout: float) -> list[ServerState]:
    until_s = time.monotonic() + timeout
    while True:
        limit_s = max(_ANSWER_S, until_s - time.monotonic())  # the Manager may still be starting, too
        try:
            states: list[ServerState] = ray.get(manager.states.remote(), timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise ServerError(
                f"the servers have not come to serve for {timeout:g} s:\n  their manager: it starts, or is stuck",
                hint="Is a runtime_env still being made? `ray list actors` knows how far the Manager is.",
            ) from None
        except ray.exceptions.RayActorError as error:
            raise ServerError(f"the servers' manager has ended: {error}", hint=_HINT_NOT_SERVING) from None
        missing = [state for state in states if state.address is None]
        if states and not missing:
            return states
        failed = [state for state in missing if state.restarts >= _MAX_FAILURES]
        if failed or time.monotonic() > until_s:
            waited = "have not come to serve" if failed else f"have not come to serve for {timeout:g} s"
            named = "\n".join(f"  {each.machine or each.key}: {each.error or 'it starts'}" for each in missing[:5])
            raise ServerError(
                f"{len(missing)} of {len(states)} servers {waited}:\n{named}",
                hint=_HINT_NOT_SERVING,
            )
        time.sleep(_LOOK_EVERY_S)
