"""What `relax-actor dcs` says and writes, of policy versions in real shared memory."""

import json
import os
import threading

import numpy as np
import pytest

from launcher import dcs as dcs_commands
from launcher import dcs_run
from launcher.cli import main
from launcher.runfolder import RunFolder, start_ticks
from launcher.toml import to_toml
from relax_actor.config import Config, DataConfig, ModelConfig
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.ids import PolicyVersion
from transport.shm import ShmSpace

HERE = os.uname().nodename


@pytest.fixture
def relax(capsys):
    """Run a command line; return exit status, output and errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def shm(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def space(shm):
    return ShmSpace("0011aabb", shm)


@pytest.fixture
def publisher(space):
    with PolicyPublisher(space, bucket_bytes=448) as made:
        yield made


@pytest.fixture
def run(tmp_path, happened, shm, model_folder, dataset):
    """A run of this very process, as its folder."""
    folder = RunFolder.create(str(tmp_path / "mine"), name="x")
    write_log(folder, happened, shm)
    config = Config(model=ModelConfig(path=str(model_folder)), data=DataConfig(path=str(dataset)))
    folder.resolved.write_text(to_toml(config))
    return folder.path


def write_log(folder, happened, shm, **fields):
    me = {"host": HERE, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "shm_root": str(shm)}
    happened.events[0] |= me | fields
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in happened.events))


def publish(publisher, version, tensors=3):
    weights = [(f"layer.{i}", np.full(32, version * 100 + i, np.float32)) for i in range(tensors)]
    return publisher.publish(PolicyVersion(version), version * 2, weights)


def damage(space, version, bucket, position=300):
    with space.attach(f"rx-0011aabb-dcs.{version}-{bucket}", writable=True) as segment:
        segment.buf[position] ^= 1


def test_ls_shows_versions_oldest_first_and_who_reads_them(relax, run, space, publisher):
    publish(publisher, 4)
    publish(publisher, 5)
    with PolicyReceiver(space).open(PolicyVersion(4)):
        code, text, _ = relax("dcs", "ls", run)

    assert code == 0
    assert text.splitlines() == [
        "version  state   step  tensors  buckets  bytes  readers",
        "      4  kept       8        3        2  704 B        1",
        "      5  newest    10        3        2  704 B        0",
    ]


def test_ls_names_the_readers_in_json(relax, run, space, publisher):
    publish(publisher, 4)
    with PolicyReceiver(space).open():
        (row,) = json.loads(relax("dcs", "ls", run, "--json")[1])

    assert row["reader_pids"] == [os.getpid()]
    assert (row["version"], row["state"], row["nbytes"]) == (4, "newest", 704)


def test_ls_tells_the_unfinished_and_the_corrupt_from_the_rest(relax, run, space, publisher):
    publish(publisher, 1)
    publish(publisher, 2)
    damage(space, 1, "manifest", 40)
    space.create("dcs", 3, "b0", 64).close()

    text = relax("dcs", "ls", run)[1]

    assert text.splitlines() == [
        "version  state       step  tensors  buckets  bytes  readers",
        "      1  corrupt                                          0",
        "      2  newest         4        3        2  704 B        0",
        "      3  unfinished                                       0",
    ]


def test_ls_of_a_run_that_has_published_nothing_is_empty(relax, run):
    assert relax("dcs", "ls", run) == (0, "no policy version yet\n", "")
    assert relax("dcs", "ls", run, "--json") == (0, "[]\n", "")


def test_a_version_retired_while_it_is_looked_at_has_no_readers(monkeypatch, run, space, publisher):
    publish(publisher, 1)
    monkeypatch.setattr(ShmSpace, "names", lambda *_: ["rx-0011aabb-dcs.1-gone"])

    assert dcs_commands._reader_pids(space, PolicyVersion(1)) == ()


def test_verify_says_that_all_is_as_published(relax, run, publisher):
    publish(publisher, 4)
    publish(publisher, 5)

    lines = [f"policy version {version}: 2 buckets, 704 B, as published\n" for version in (4, 5)]
    assert relax("dcs", "verify", run) == (0, "".join(lines), "")
    assert relax("dcs", "verify", run, 5)[1] == "policy version 5: 2 buckets, 704 B, as published\n"
    assert relax("dcs", "verify", run, "latest")[1] == "policy version 5: 2 buckets, 704 B, as published\n"


def test_verify_names_every_bucket_that_is_corrupt(relax, run, space, publisher):
    manifest = publish(publisher, 4, tensors=6)
    publish(publisher, 5)
    damage(space, 4, "b0")
    damage(space, 4, "b2")

    code, text, _ = relax("dcs", "verify", run)
    verdicts = json.loads(relax("dcs", "verify", run, "--json")[1])

    first, second, third = text.splitlines()
    assert code == 1
    assert first.startswith(
        f"bucket 0 of policy version 4 is corrupt: expected {manifest.buckets[0].xxh3}, found "
    )
    assert second.startswith("bucket 2 of policy version 4 is corrupt: expected ")
    assert third == "policy version 5: 2 buckets, 704 B, as published"
    assert [damage["bucket"] for damage in verdicts[0]["corrupt"]] == [0, 2]
    assert verdicts[1]["corrupt"] == []


def test_verify_names_a_bucket_that_was_cut_and_a_damaged_manifest(relax, run, space, publisher):
    publish(publisher, 4)
    publish(publisher, 5)
    os.truncate(space.root / "rx-0011aabb-dcs.4-b1", 10)
    damage(space, 5, "manifest", 40)

    code, text, _ = relax("dcs", "verify", run)

    assert code == 1
    assert text.startswith("bucket 1 of policy version 4 is corrupt: expected 256 bytes, found 10\n")
    assert "the manifest of policy version 5 is corrupt: expected " in text
    assert text.endswith(relax("dcs", "verify", run, "latest")[1])


def test_verify_passes_over_what_is_retired_meanwhile(relax, run, monkeypatch, publisher):
    publish(publisher, 5)
    versions = {PolicyVersion(3): True, PolicyVersion(4): False, PolicyVersion(5): True}
    monkeypatch.setattr(dcs_run.DcsRun, "versions", lambda _: versions)

    assert relax("dcs", "verify", run)[:2] == (0, "policy version 5: 2 buckets, 704 B, as published\n")


def test_export_writes_what_safetensors_and_the_index_agree_on(relax, run, publisher, tmp_path, model_folder):
    publish(publisher, 5)
    target = tmp_path / "deep" / "exported"
    (model_folder / "rows.jsonl").write_text("{}")  # prompts beside the model are no part of it

    code, text, _ = relax("dcs", "export", run, "latest", target)

    assert (code, text) == (0, f"{target}: policy version 5 of step 10: 2 files, 704 B\n")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        *files,
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 3 * 128},
        "weight_map": {"layer.0": files[0], "layer.1": files[0], "layer.2": files[1]},
    }
    assert (target / "config.json").read_bytes() == (model_folder / "config.json").read_bytes()
    assert sorted(tmp_path.joinpath("deep").iterdir()) == [target]


def test_an_export_outlives_the_version_and_links_do_not(relax, run, publisher, tmp_path):
    from safetensors import safe_open

    publish(publisher, 0)
    relax("dcs", "export", run, 0, tmp_path / "copied")
    code, text, _ = relax("dcs", "export", run, 0, tmp_path / "linked", "--link")
    assert (code, text.splitlines()[1]) == (0, "the links lead nowhere once version 0 is retired")
    for folder in ("copied", "linked"):
        with safe_open(tmp_path / folder / "model-00001-of-00002.safetensors", "np") as file:
            assert (file.get_tensor("layer.1") == 1).all()

    for version in (1, 2, 3):
        publish(publisher, version)

    assert (tmp_path / "copied" / "model-00001-of-00002.safetensors").stat().st_size == 448
    assert not (tmp_path / "linked" / "model-00001-of-00002.safetensors").exists()


def test_export_says_what_it_wrote_in_json(relax, run, publisher, tmp_path):
    publish(publisher, 5)

    said = json.loads(relax("dcs", "export", run, 5, tmp_path / "out", "--link", "--json")[1])

    assert said == {
        "folder": str(tmp_path / "out"),
        "version": 5,
        "step": 10,
        "files": 2,
        "nbytes": 704,
        "linked": True,
    }


def test_what_is_corrupt_is_not_exported(relax, run, space, publisher, tmp_path):
    publish(publisher, 5)
    damage(space, 5, "b1", 200)

    code, _, error = relax("dcs", "export", run, "latest", tmp_path / "out")

    assert (code, error.startswith("error: bucket 1 of policy version 5 is corrupt")) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []


def test_a_run_is_found_by_its_id_while_it_has_shared_memory(relax, tmp_path, model_folder):
    space = ShmSpace(f"cli{os.getpid()}")
    try:
        with PolicyPublisher(space) as publisher:
            publish(publisher, 7)
            assert relax("dcs", "verify", space.run_id)[1].startswith("policy version 7: 1 bucket, 640 B")
            fact = f"which model `{space.run_id}` trains is not written down"
            refused = relax("dcs", "export", space.run_id, "latest", tmp_path / "out")
            assert refused == (2, "", f"error: {fact}\n\nhint: --model names its folder\n")
            code, *_ = relax("dcs", "export", space.run_id, 7, tmp_path / "out", "--model", model_folder)
            assert (code, (tmp_path / "out" / "config.json").exists()) == (0, True)
    finally:
        space.sweep()


ENDED = "error: `{run}` has ended, and its policy versions went with it\n\nhint: "


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["export", "latest", "out"]], ids=lambda c: c[0])
def test_of_a_run_that_has_ended_there_is_a_checkpoint_at_best(relax, run, happened, shm, command):
    folder = RunFolder(run)
    happened.add("run_ended", exit_code=0, reason="done")
    write_log(folder, happened, shm, pid=2**22 + 1)
    arguments = ["dcs", command[0], run, *command[1:]]

    assert relax(*arguments) == (2, "", ENDED.format(run=run) + "it left no checkpoint\n")
    for name in ("000001-step-2", "000002-step-4", ".000003-step-6"):
        (folder.checkpoints / name / "model").mkdir(parents=True)
    newest = folder.checkpoints / "000002-step-4" / "model"
    assert relax(*arguments) == (2, "", ENDED.format(run=run) + f"its newest checkpoint is {newest}\n")


def test_what_a_dead_run_left_behind_can_still_be_read(relax, run, happened, shm, publisher):
    publish(publisher, 5)
    write_log(RunFolder(run), happened, shm, pid=2**22 + 1)

    assert relax("dcs", "ls", run)[0] == relax("dcs", "verify", run)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "verify {run} 9",
            (
                "policy version 9 is not in shared memory; the newest is 5",
                "relax-actor dcs ls {run} lists what there is",
            ),
        ),
        (
            "export {run} 9 {tmp}/out",
            (
                "policy version 9 is not in shared memory; the newest is 5",
                "relax-actor dcs ls {run} lists what there is",
            ),
        ),
        ("verify {run} -x", ("`-x` is not an option", "relax-actor dcs verify --help shows what there is")),
        (
            "verify {run} newest",
            (
                "invalid value for VERSION: `newest` is neither a number nor `latest`",
                "relax-actor dcs verify --help shows what there is",
            ),
        ),
        ("verfy {run}", ("no such command 'verfy'", "did you mean 'verify'?")),
        ("ls {tmp}/shm", ("`{tmp}/shm` is not a run folder", "the newest run is {run}")),
        (
            "export {run} latest {tmp}/shm",
            ("`{tmp}/shm` is there already", "name another folder, or remove it"),
        ),
        (
            "export {run} latest {tmp}/rows.jsonl/out",
            ("`{tmp}/rows.jsonl/out` cannot be written: Not a directory", "name another folder"),
        ),
        (
            "export {run} latest {tmp}/out --model {tmp}/shm",
            ("`{tmp}/shm` has no config.json", "--model names the folder of the model that is trained"),
        ),
    ],
)
def test_what_is_refused_is_named_with_a_hint(relax, run, publisher, arguments, problem):
    publish(publisher, 5)
    places = {"run": run, "tmp": run.parent}

    done = relax("dcs", *(word.format(**places) for word in arguments.split()))

    assert done == (2, "", "error: {}\n\nhint: {}\n".format(*problem).format(**places))


def test_before_the_first_version_there_is_nothing_to_verify(relax, run):
    fact = f"`{run}` has published no policy version yet"

    assert relax("dcs", "verify", run) == (
        2,
        "",
        f"error: {fact}\n\nhint: its trainer publishes the first when it is ready\n",
    )


def test_the_run_goes_on_while_its_versions_are_looked_at(relax, run, publisher, tmp_path):
    """What is leased does not change, what is retired meanwhile is passed over."""
    publish(publisher, 0)
    finished = threading.Event()

    def train():
        version = 1
        while not finished.is_set():
            publish(publisher, version)
            version += 1

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for number in range(20):
            assert relax("dcs", "verify", run)[0] == relax("dcs", "ls", run)[0] == 0
            assert relax("dcs", "export", run, "latest", tmp_path / f"out{number}")[0] == 0
    finally:
        finished.set()
        trainer.join(timeout=10)


def test_of_a_run_on_another_host_its_versions_are_there(relax, run, happened, shm):
    write_log(RunFolder(run), happened, shm, host="elsewhere")

    assert relax("dcs", "ls", run) == (0, "no policy version yet\n", "")
    assert relax("dcs", "verify", run) == (
        2,
        "",
        f"error: no policy version of `{run}` is on this host\n\nhint: ask on elsewhere\n",
    )


def test_of_a_run_that_has_not_begun_nothing_is_known(relax, tmp_path):
    folder = RunFolder.create(str(tmp_path / "new"), name="x")
    folder.events.touch()

    assert relax("dcs", "ls", folder.path) == (
        2,
        "",
        f"error: `{folder.path}` has not begun\n\nhint: relax-actor status {folder.path}\n",
    )


def test_shared_memory_that_is_not_on_this_host_is_no_crash(relax, run, happened, tmp_path):
    write_log(RunFolder(run), happened, tmp_path / "nowhere")

    assert relax("dcs", "ls", run) == (0, "no policy version yet\n", "")
