"""Connection to a Ray cluster, with checks that its nodes would give the same results as this machine.

Ray is imported only when a cluster is used.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vajra_py.cluster.fingerprint import EVERY_NODE, difference, fingerprint
from vajra_py.errors import ConfigError, Problem, RunError

LOCAL = "local"
_AUTO = "auto"
_ADDRESS = re.compile(r"(ray://)?(?P<host>[\w.\-]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")
_ALLOWED = "Allowed: local, auto (the cluster of this machine), HOST:PORT (of its head, from one of its nodes), ray://HOST:PORT"
_REACH_S = 5.0
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Connected cluster whose nodes have this machine's fingerprint."""

    ray: Any
    """The module `ray`, after connecting."""
    fingerprint: Mapping[str, str]
    """Fingerprint of this machine; every node must have the same one."""

    @property
    def is_there(self) -> bool:
        """True while the cluster is connected. Check this before queries: if the connection is lost, a query would make
        Ray start a local cluster.
        """
        return bool(self.ray.is_initialized())

    @property
    def num_cpus(self) -> int:
        """Current number of CPUs of the cluster."""
        return int(self.ray.cluster_resources().get("CPU", 0))

    def nodes(self) -> list[Any]:
        """Return Ray's records of the live nodes that can compute."""
        return [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


@contextmanager
def ray_cluster(on: str) -> Iterator[RayCluster | None]:
    """Connect to the cluster named by `on` for the duration of the context; yields None for `local`, this machine
    without Ray.

    Raises `ConfigError` for an invalid place or if the package `ray` is missing, and `RunError` if the cluster cannot
    be reached or a node differs from this machine in a version that affects results.
    """
    if on == LOCAL:
        yield None
        return
    match = _ADDRESS.fullmatch(on)
    if on != _AUTO and match is None:
        raise ConfigError(Problem("--on", f"is not a place to run on ({on!r})", _ALLOWED))
    ray = _import_ray()
    if match is not None:
        _check_listening(on, match["host"].strip("[]"), int(match["port"]))
    _connect(ray, on)
    try:
        cluster = RayCluster(ray, fingerprint())
        _check_nodes(cluster)
        yield cluster
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        message = f"runs on Ray, which is not installed ({error.name})"
        raise ConfigError(Problem("--on", message, 'Install the extra: pip install "vajra-py[ray]"')) from None


def _check_listening(on: str, host: str, port: int) -> None:
    """Raise `RunError` within seconds if the port does not accept connections; Ray itself tries for a minute."""
    try:
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no host has such a name
        what = getattr(error, "strerror", None) or "no answer"
        raise RunError(
            f"--on {on}: the cluster cannot be reached ({what}). Is its head node up, and the port right?"
        ) from None


def _connect(ray: Any, on: str, *, again: bool = True) -> None:
    # Without this setting, Ray warns that a default will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=on, configure_logging=False, log_to_driver=False)
    except Exception as error:  # Ray has no dedicated error for a failed connection
        message = " ".join(str(error).split())
        if again and "Initialization failure" in message:  # Ray's process for this client exited at once: try again
            return _connect(ray, on, again=False)
        if "ersion mismatch" in message:
            raise RunError(f"--on {on}: the cluster has another version of Ray or Python ({message}).") from None
        raise RunError(f"--on {on}: the cluster cannot be used ({message or type(error).__name__}).") from None


def _check_nodes(cluster: RayCluster) -> None:
    """Raise `RunError` for the first node that differs from this machine, or if no node can compute."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = cluster.ray
    probe = ray.remote(num_cpus=0, max_retries=0)(_probe())
    answers = []
    for node in cluster.nodes():
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers.append((node, probe.options(scheduling_strategy=where).remote()))
    for node, answer in answers:
        name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        try:
            found = ray.get(answer, timeout=_ANSWER_S)
        except Exception as error:  # whatever the error, a node that is still listed cannot be used
            if all(one["NodeID"] != node["NodeID"] for one in cluster.nodes()):
                continue  # the node has died since it was listed
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RunError(
                f"{name}: does not answer ({lines[-1]}). Repair it, or remove it from the cluster."
            ) from None
        differs = found if isinstance(found, str) else difference(cluster.fingerprint, found)
        if differs:
            raise RunError(f"{name}: {differs}. {EVERY_NODE}")
    if not cluster.nodes():
        raise RunError("--on: no node of the cluster has a CPU to offer. Start one: ray start --address=HEAD:PORT")


def _probe() -> Any:
    """Return the function that probes a node. It is nested so that Ray sends its code instead of a module's name."""

    def probe() -> Any:
        try:
            from vajra_py.cluster.fingerprint import fingerprint
        except ImportError as error:
            return f"cannot import vajra-py ({error})"
        return fingerprint()

    return probe
