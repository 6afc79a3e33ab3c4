"""Hosts as network namespaces of this machine, on a bridge."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from relax_actor.supervision.hosts import Host


@dataclass
class Network:
    """A bridge, and namespaces on it named `a` and `b`; this process' namespace is the head's."""

    tag: str
    head: str
    made: list[list[str]] = field(default_factory=list)

    def namespace(self, name):
        return f"rx{self.tag}{name}"

    def address(self, name):
        stem = self.head.rpartition("::" if ":" in self.head else ".")[0]
        return f"{stem}{'::' if ':' in self.head else '.'}{10 + ord(name) - ord('a')}"

    def inside(self, name):
        return ("ip", "netns", "exec", self.namespace(name))

    def host(self, name, tmp_path, *, inside=(), outside=()):
        shm = tmp_path / f"shm-{name}"
        shm.mkdir()
        return Host(
            name=name,
            prefix=(*outside, *self.inside(name), *inside),
            address=self.address(name),
            shm_root=str(shm),
        )

    def cut(self, name):
        ip("link", "set", f"v{self.tag}{name}", "down")

    def heal(self, name):
        ip("link", "set", f"v{self.tag}{name}", "up")


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def build(network, prefix, width):
    bridge, nodad = f"br{network.tag}", ["nodad"] if ":" in prefix else []
    ip("link", "add", bridge, "type", "bridge")
    ip("addr", "add", f"{network.head}/{width}", "dev", bridge, *nodad)
    ip("link", "set", bridge, "up")
    for number, name in enumerate("ab", start=10):
        space, link = network.namespace(name), f"v{network.tag}{name}"
        ip("netns", "add", space)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", link, "master", bridge, "up")
        inside = ["netns", "exec", space, "ip"]
        ip(*inside, "addr", "add", f"{prefix}{number}/{width}", "dev", "eth0", *nodad)
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "link", "set", "lo", "up")


def tear_down(network):
    for name in "ab":
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", network.namespace(name))
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", f"v{network.tag}{name}")
    with suppress(subprocess.CalledProcessError):
        ip("link", "del", f"br{network.tag}")


def make_network(prefix, width):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make network namespaces")
    network = Network(tag=secrets.token_hex(2), head=f"{prefix}1")
    try:
        build(network, prefix, width)
    except subprocess.CalledProcessError as error:
        tear_down(network)
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    return network


@contextmanager
def some_network() -> Iterator[Network]:
    """Make a network at an address that no other test is likely to have, for as long as the block takes."""
    network = make_network(f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}.", 24)
    try:
        yield network
    finally:
        tear_down(network)
