"""Inside an allocation: which hosts there are, and a tree over them, whose end leaves nothing."""

import json
import sys

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

SURVEY = """
import json, os
from launcher.slurm_hosts import allocation, survey
found = allocation(os.environ)
print(json.dumps([found.here, [[e.name, e.address, e.gpus] for e in survey(found)]]))
"""


def test_every_host_says_which_gpus_it_has_for_us(slurm):
    gpus = ("--gpus-per-node=2",) if slurm.has_gpus else ()
    said = slurm("salloc", "--quiet", "--nodes=2", *gpus, sys.executable, "-c", SURVEY)

    names = ["0", "1"] if slurm.has_gpus else None
    assert json.loads(said) == ["", [["n1", "127.0.0.1", names], ["n2", "127.0.0.1", names]]]
