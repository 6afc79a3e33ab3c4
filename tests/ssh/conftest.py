"""Fixtures of the tests through ssh: sshds of their own, an environment outside the PATH, trees over them."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest
import ssh_hosts
from namespaces import make_network, tear_down
from ssh_hosts import Servers
from ssh_launch import Launcher as Starter

from launcher.options import Launcher, LaunchOptions, NetworkOptions, RemoteOptions
from launcher.over_hosts import Reached, hosts_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; skip it where there is no sshd, unless one was promised."""
    reason = ssh_hosts.missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ssh)
            if reason and os.environ.get("REQUIRE_SSH") != "1":
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start nothing yet; every server that a test starts ends with the session."""
    assert not ssh_hosts.missing(), ssh_hosts.missing()
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("ssh"), stack)
        servers.make_keys()
        yield servers


@pytest.fixture(scope="session")
def pair(servers: Servers) -> list[ssh_hosts.Sshd]:
    """Return two servers that most tests share."""
    return [servers.start(), servers.start()]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter that no PATH leads to."""
    return ssh_hosts.make_venv(tmp_path_factory.mktemp("venv") / "my env")


@pytest.fixture
def reach(servers: Servers, python: Path, tmp_path: Path):
    """Return what makes hosts of servers."""

    def reach(*which: ssh_hosts.Sshd, ssh=None, entries=(), master_addr="", **remote: object) -> Reached:
        options = LaunchOptions(
            launcher=Launcher.SSH,
            hosts=tuple(entries) or tuple(map(servers.entry, which)),
            ssh=ssh or servers.options(),
            network=NetworkOptions(master_addr=master_addr),
            remote=msgspec.structs.replace(
                RemoteOptions(python=str(python), workdir=str(tmp_path)), **remote
            ),
        )
        return hosts_of(options, tmp_path / "run")

    return reach


@pytest.fixture
def start(servers: Servers, python: Path, tiny_model, tmp_path: Path) -> Iterator[Starter]:
    """Return what starts a launch over servers."""
    starter = Starter(servers, python, tiny_model, tmp_path)
    yield starter
    starter.close()


@pytest.fixture
def network():
    """Return two hosts as network namespaces."""
    network = make_network(f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}.", 24)
    yield network
    tear_down(network)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what a launch sets in this process."""
    for name in ("no_proxy", "NO_PROXY", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_left(servers: Servers) -> Iterator[None]:
    """Fail where a session outlives its test."""
    yield
    deadline = time.monotonic() + 40
    while sessions := [each for server in servers.running for each in _of(server)]:
        assert time.monotonic() < deadline, [each.cmdline() for each in sessions]
        time.sleep(0.05)


def _of(server: ssh_hosts.Sshd) -> list[psutil.Process]:
    try:
        return server.sessions
    except psutil.NoSuchProcess:
        return []
