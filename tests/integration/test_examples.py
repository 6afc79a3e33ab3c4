"""The examples that need neither weights nor a network do what their first lines say."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    """Run an example in `folder` as a user does; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _without_docstrings(source: ast.Module) -> ast.Module:
    for node in ast.walk(source):
        if isinstance(node, ast.Module | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return source


@pytest.mark.fault
def test_words_are_counted_once_although_a_counter_dies(tmp_path):
    out = run("embedded/counters.py", folder=tmp_path)
    assert "line 2: counter/0, incarnation 2" in out
    assert "{'and': 1, 'cat': 2, 'dog': 2, 'mat': 2, 'on': 3, 'sat': 1, 'saw': 1, 'the': 6}" in out
    assert "counter/0 (incarnation 1, pid " in out
    assert "died: SIGKILL" in out


@pytest.mark.fault
def test_every_row_passes_three_stages_although_one_dies(tmp_path):
    out = run("row_queue/stages.py", folder=tmp_path)
    assert out.count("picture") == 16
    assert "group 7: text number 15, picture 7, score 14" in out
    assert out.splitlines()[-1] == "{'put': 16, 'acked': 16}"


def test_the_application_of_the_guide_is_as_short_as_it_says():
    assert "in 40 lines of code" in (EXAMPLES.parent / "docs" / "guides" / "embed.md").read_text()
    source = ast.parse((EXAMPLES / "embedded" / "counters.py").read_text())
    code = ast.unparse(_without_docstrings(source)).splitlines()
    assert sum(bool(line.strip()) for line in code) <= 40


@pytest.mark.fault
def test_a_program_decides_about_failures_itself(tmp_path):
    out = run("embedded/stubborn.py", folder=tmp_path)
    assert "job 7 done by incarnation 3" in out
    assert "job 8 failed: MemoryError" in out
    assert "job 9 failed: CallTimeout" in out  # it was left down
    assert out.rstrip().endswith("worker#3 gone (exit code 1: MemoryError: job 8 is one too many)")


@pytest.mark.fault
def test_the_kill_demo_keeps_its_promises_on_a_tiny_model(tmp_path):
    """Invariants I2, I5 and I7 as its report states them."""
    out = run("kill_demo.py", "--tiny", "--steps", "10", folder=tmp_path)
    assert out.splitlines()[-1].startswith("as promised")
    assert "killed 2 times" in out
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_kill_demo_asks_for_a_model(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "kill_demo.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "MODEL_FOLDER or --tiny is wanted" in done.stderr
