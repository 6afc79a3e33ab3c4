"""The example hostfile, and the one of the guide, are ones that can be used."""

import re
from pathlib import Path

from launcher.hostfile import parse, read

ROOT = Path(__file__).parents[3]


def test_the_example_hostfile_is_read():
    hosts = read(ROOT / "hostfile.example")

    assert [host.name for host in hosts][2:7] == ["node03", "node04", "node05", "node06", "node09"]
    assert len(hosts) == 11


def test_the_hostfile_of_the_guide_is_read():
    guide = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    (block,) = re.findall(r"```text\n(# comments.*?)```", guide, re.DOTALL)

    assert len(parse(block)) == 11
