"""What users get is the built wheel, and it runs beside modules of theirs with the same names."""

import os
import subprocess
import sys
import textwrap
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTILE = 'raise RuntimeError("the user\'s own {name}.py was imported")\n'

EMBEDS = """
    import sys
    from relax_actor import Actor, ChildSpec, Supervisor, SupervisorSpec, endpoint

    class Where(Actor):
        @endpoint
        def files(self) -> list[str]:
            import relax_actor, transport
            return [relax_actor.__file__, transport.__file__]

    if __name__ == "__main__":
        spec = SupervisorSpec(id="root", children=(ChildSpec(id="where", actor=Where),))
        with Supervisor(spec) as tree:
            print("\\n".join(tree.ref("where", Where).ask(Where.files).result()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel: with the build backend of this environment if it has one, else in one of its own."""
    out = tmp_path_factory.mktemp("dist")
    isolation = ["--no-isolation"] if find_spec("hatchling") else []
    execute([sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", str(out), str(ROOT)], cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone; what it depends on comes from this environment."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    execute([*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel)], cwd=target)
    return target


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """Return a folder where the user has modules of their own, which nobody of ours may import."""
    for name in ("launcher", "transport"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.format(name=name))
    return tmp_path


def execute(command: list[str], *, cwd: Path, path: Path | None = None) -> str:
    done = attempt(command, cwd=cwd, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(command: list[str], *, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_wheel_has_three_typed_packages_and_the_licence_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    metadata = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in names} == {"launcher", "relax_actor", "transport", metadata}
    for package in ("launcher", "relax_actor", "transport"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(names)
    assert f"{metadata}/licenses/LICENSE" in names
    assert not [name for name in names if Path(name).name.startswith(("test_", "conftest"))]


def test_every_python_file_of_the_packages_is_in_the_wheel(wheel):
    ours = {
        str(file.relative_to(ROOT))
        for package in ("launcher", "relax_actor", "transport")
        for file in (ROOT / package).rglob("*.py")
    }
    assert ours <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("how", ["script", "module"])
def test_the_command_line_works_beside_modules_of_the_same_names(installed, workdir, how):
    script, module = [str(installed / "bin" / "relax-actor")], [sys.executable, "-m", "relax_actor"]
    command = script if how == "script" else module
    out = execute([*command, "--help"], cwd=workdir, path=installed)
    assert out.startswith("Usage: relax-actor [OPTIONS] COMMAND")


def test_a_script_beside_modules_of_the_same_names_starts_actors_of_the_wheel(installed, workdir):
    """Its own folder comes first on its path, and still `transport` is ours, there and in the actor."""
    (workdir / "mine.py").write_text(textwrap.dedent(EMBEDS))
    files = execute([sys.executable, "mine.py"], cwd=workdir, path=installed).split()
    assert files == [str(installed / name / "__init__.py") for name in ("relax_actor", "transport")]


def test_who_imports_another_transport_first_is_told_of_both(installed, tmp_path):
    (tmp_path / "transport.py").write_text("")
    (tmp_path / "mine.py").write_text("import transport\nimport relax_actor\n")
    done = attempt([sys.executable, "mine.py"], cwd=tmp_path, path=installed)
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("ImportError") :]
    assert str(tmp_path / "transport.py") in last
    assert "relax-actor's own package" in last
    assert "hint: import relax_actor first, or rename that module" in last
