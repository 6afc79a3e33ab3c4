"""A server that fails at any step of an update: an error names it, and no version is there that is not."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_client import PlainClient
from safetensors.torch import save_file
from weight_server import WeightServer

from relax_actor.dcs import PolicyPublisher
from relax_actor.engines.sglang.weights import (
    Deadlines,
    DigestError,
    MemoryTag,
    RouteClosedError,
    ServerMemory,
    SglangUpdateError,
    UpdateMode,
    Updater,
    UpdateRoute,
    UpdateSettings,
    WeightPlacement,
)
from relax_actor.engines.sglang.weights.disk import CheckpointFiles, SharedMemoryFiles
from relax_actor.ids import PolicyVersion
from relax_actor.trainers.checkpoint import CheckpointStore
from transport.shm import ShmSpace

OLD, NEW = (0, 5, 17), (0, 5, 23)
V1, V2 = PolicyVersion(1), PolicyVersion(2)
PATIENT = Deadlines(step_s=20.0)
LONELY = Deadlines(step_s=20.0, join_s=0.5)
"""For a group that nobody joins."""
TENSOR = "/update_weights_from_tensor"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(8, 8, generator=generator) for n in range(5)}


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[WeightServer, PlainClient]]]:
    """Starts servers of a version, each with a client."""
    with contextlib.ExitStack() as stack:

        def started(version: tuple[int, ...] = NEW) -> tuple[WeightServer, PlainClient]:
            server = WeightServer(version)
            client = PlainClient(stack.enter_context(server.serving()))
            stack.callback(client.close)
            return server, client

        yield started


def updater_of(server: WeightServer, client: PlainClient, **fields: Any) -> Updater:
    """Make an updater whose buckets hold two weights each."""
    files, placement = fields.pop("files", ()), fields.pop("placement", None)
    fields = {"bucket_bytes": 512, "routes": (UpdateRoute.IPC,), "deadlines": PATIENT} | fields
    return Updater(client, server, UpdateSettings(**fields), files=files, placement=placement)


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("mode", [UpdateMode.IN_PLACE, UpdateMode.ABORT])
def test_a_version_is_whole_when_the_update_returns(serve, version, mode):
    server, client = serve(version)

    report = updater_of(server, client).update(V1, weights().items(), mode=mode)

    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights().items())
    assert (server.weight_version, server.is_paused, server.in_session) == ("1", False, False)
    assert (report.mode, report.route, report.buckets, report.nbytes) == (mode, "ipc", 3, 5 * 256)
    assert 0 < report.paused_s <= report.seconds


def test_only_the_last_bucket_says_the_version(serve):
    server, client = serve()

    updater_of(server, client).update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

    said = [body["weight_version"] for path, body in server.calls if path == TENSOR]
    assert said == [None, None, "1"]


def test_the_first_bucket_is_full_before_anything_is_paused(serve):
    """What a source needs for its first bytes costs no decode step."""
    server, client = serve()
    seen: list[list[str]] = []

    def source():
        for name, tensor in weights().items():
            seen.append(server.paths)
            yield name, tensor

    updater_of(server, client).update(
        V1, source(), mode=UpdateMode.ABORT, on_pause=lambda: seen.append([*server.paths, "collected"])
    )

    assert seen[:4] == [[], [], [], ["collected"]]
    assert seen[4][:2] == ["/pause_generation", "/begin_weight_update"]


def test_the_next_bucket_is_filled_while_the_server_loads_this_one(serve):
    server, client = serve()
    loading, filled = threading.Event(), threading.Event()
    load = server.on_update_weights_from_tensor

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        loading.set()
        return load(body) if filled.wait(20) else (500, "nobody fills the next bucket")

    def source():
        for number, each in enumerate(weights().items()):
            if number == 4:  # the third bucket's, so the second was filled while the first was loaded
                filled.set()
            elif number == 3:
                assert loading.wait(20)
            yield each

    server.on_update_weights_from_tensor = slow
    updater_of(server, client).update(V1, source(), mode=UpdateMode.IN_PLACE)

    assert server.weight_version == "1"


@pytest.mark.parametrize(
    ("path", "step", "nth"),
    [
        ("/pause_generation", "pause", 1),
        ("/begin_weight_update", "begin", 1),
        (TENSOR, "load", 1),
        (TENSOR, "load", 2),
        (TENSOR, "load", 3),
        ("/end_weight_update", "end", 1),
        ("/flush_cache", "flush", 1),
        ("/model_info", "version", 1),
        ("/continue_generation", "continue", 1),
    ],
)
@pytest.mark.parametrize("how", ["false", "400", "500", "close", "hang"])
def test_whatever_fails_at_any_step_leaves_the_weights_in_doubt(serve, path, step, nth, how):
    """The error names the step, and a server that failed in the middle is still paused."""
    server, client = serve()
    server.break_at(path, how, nth)
    if how == "hang":
        client.hurry_at(path, nth)
    updater = updater_of(server, client)

    with pytest.raises(SglangUpdateError) as caught:
        updater.update(V1, weights().items(), mode=UpdateMode.ABORT)

    assert (caught.value.step, caught.value.version) == (step, 1)
    assert updater.is_torn
    assert "/continue_generation" not in server.paths or step == "continue"


def test_a_server_that_says_success_and_did_nothing_is_found_out(serve):
    server, client = serve()
    server.break_at(TENSOR, "lie", 3)

    with pytest.raises(SglangUpdateError, match="the server has version 'uninit', not '1'"):
        updater_of(server, client).update(V1, weights().items(), mode=UpdateMode.IN_PLACE)


def test_a_cache_that_cannot_be_flushed_is_doubt(serve):
    """Requests that somebody else has sent would go on with the old weights' keys and values."""
    server, client = serve()
    server.requests = 1

    with pytest.raises(SglangUpdateError, match=r"step `flush`.*requests are present"):
        updater_of(server, client).update(V1, weights().items(), mode=UpdateMode.ABORT)


def test_a_source_that_fails_before_its_first_bucket_is_full_touches_nothing(serve):
    server, client = serve()
    updater = updater_of(server, client)

    with pytest.raises(OSError, match="gone"):
        updater.update(V1, broken(after=1), mode=UpdateMode.IN_PLACE)

    assert not updater.is_torn
    assert server.paths == []


@pytest.mark.parametrize("after", [3, 4, 5])
def test_a_source_that_fails_later_leaves_the_weights_in_doubt(serve, after):
    server, client = serve()
    updater = updater_of(server, client)

    with pytest.raises(SglangUpdateError, match=r"step `load`.*OSError: gone"):
        updater.update(V1, broken(after=after), mode=UpdateMode.IN_PLACE)

    assert updater.is_torn
    assert server.weight_version == "uninit"


def broken(*, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, each in enumerate(weights().items()):
        if number == after:
            break
        yield each
    raise OSError("gone")


def test_what_fails_while_requests_are_collected_touches_nothing(serve):
    server, client = serve()
    updater = updater_of(server, client)

    def collect():
        raise TimeoutError("a request did not come back")

    with pytest.raises(TimeoutError):
        updater.update(V1, weights().items(), mode=UpdateMode.ABORT, on_pause=collect)

    assert not updater.is_torn
    assert server.paths == []


def test_a_mode_that_the_server_cannot_do_is_refused_before_anything_is_read(serve):
    server, client = serve(OLD)

    with pytest.raises(ValueError, match="refuses to flush"):
        updater_of(server, client).update(V1, broken(after=0), mode=UpdateMode.RETRACT)

    assert server.paths == []


def test_a_pause_in_place_waits_for_the_gpu(serve):
    server, client = serve()
    server.device = "cuda"

    updater_of(server, client).update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

    assert server.paths[:3] == ["/pause_generation", "/weights_checker", "/begin_weight_update"]


def test_replicas_compare_what_they_have_installed(serve, tmp_path: Path):
    servers = [serve(), serve()]
    for server, _ in servers:
        server.device = "cuda"
    first, second = (
        updater_of(server, client, digests=tmp_path, model_path=Path("qwen")) for server, client in servers
    )
    report = first.update(V1, weights().items(), mode=UpdateMode.ABORT)
    second.update(V1, weights().items(), mode=UpdateMode.ABORT)
    servers[1][0].digest = "other"
    first.update(V2, weights().items(), mode=UpdateMode.ABORT)

    with pytest.raises(DigestError):
        second.update(V2, weights().items(), mode=UpdateMode.ABORT)

    assert report.checksum_s is not None
    assert second.is_torn
    assert servers[1][0].is_paused


# -- routes ---------------------------------------------------------------------------------------


def test_files_in_shared_memory_are_a_model_folder(serve, tmp_path: Path):
    server, client = serve()
    model = tmp_path / "model"
    write_model(model)
    space = ShmSpace("sglangdisk", tmp_path)
    with contextlib.closing(PolicyPublisher(space, keep=2, bucket_bytes=600)) as publisher:
        publisher.publish(V1, 0, weights().items())
        updater = updater_of(
            server,
            client,
            routes=(UpdateRoute.DISK,),
            model_path=model,
            scratch=tmp_path / "scratch",
            files=(SharedMemoryFiles(space), CheckpointFiles(tmp_path / "checkpoints")),
        )

        report = updater.update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

        with pytest.raises(RouteClosedError, match=r"not in shared memory.*no checkpoint"):
            updater.update(V2, weights().items(), mode=UpdateMode.IN_PLACE)
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights().items())
    assert report.route is UpdateRoute.DISK
    assert not updater.is_torn
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_version_that_has_left_shared_memory_is_read_from_its_checkpoint(serve, tmp_path: Path):
    server, client = serve()
    CheckpointStore(tmp_path / "checkpoints").save(
        1, lambda folder: write_model(folder / "model"), {"policy_version": 1}
    )
    write_model(tmp_path / "model")
    updater = updater_of(
        server,
        client,
        routes=(UpdateRoute.DISK,),
        model_path=tmp_path / "model",
        scratch=tmp_path / "scratch",
        files=(
            SharedMemoryFiles(ShmSpace("sglanggone", tmp_path)),
            CheckpointFiles(tmp_path / "checkpoints"),
        ),
    )

    report = updater.update(V1, weights().items(), mode=UpdateMode.ABORT)

    assert report.buckets == 1
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights().items())


def write_model(folder: Path) -> None:
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def test_the_next_route_is_taken_while_nothing_is_torn(serve, tmp_path: Path):
    """A group that has no meeting place is given up before the server has heard of it."""
    server, client = serve()
    model = tmp_path / "model"
    write_model(model)
    space = ShmSpace("sglangnext", tmp_path)
    with contextlib.closing(PolicyPublisher(space, keep=2, bucket_bytes=600)) as publisher:
        publisher.publish(V1, 0, weights().items())
        updater = updater_of(
            server,
            client,
            routes=(UpdateRoute.GROUP, UpdateRoute.DISK),
            model_path=model,
            scratch=tmp_path / "scratch",
            files=(SharedMemoryFiles(space),),
            placement=WeightPlacement(address="no-such-host.invalid"),
            deadlines=LONELY,
        )

        report = updater.update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

    assert report.route is UpdateRoute.DISK
    assert server.paths[0] == "/pause_generation"


def test_a_server_that_refuses_to_join_is_in_doubt(serve):
    """One rank has answered; others may wait for ever."""
    server, client = serve()
    updater = updater_of(server, client, routes=tuple(UpdateRoute)[1:])

    with pytest.raises(SglangUpdateError, match="joins nothing"):
        updater.update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

    assert updater.is_torn


def test_a_server_that_never_joins_is_in_doubt(serve):
    """Its scheduler waits for ever: only a kill ends that."""
    server, client = serve()
    server.break_at("/init_weights_update_group", "hang")
    updater = updater_of(server, client, routes=(UpdateRoute.GROUP,), deadlines=LONELY)

    with pytest.raises(SglangUpdateError) as caught:
        updater.update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

    assert caught.value.step == "join"
    assert updater.is_torn


def test_without_any_route_nothing_is_touched(serve):
    server, client = serve()

    with pytest.raises(RouteClosedError, match="none leads to this server"):
        updater_of(server, client, routes=()).update(V1, weights().items(), mode=UpdateMode.IN_PLACE)

    assert server.paths == []


# -- memory ---------------------------------------------------------------------------------------


def test_memory_is_given_back_once_and_taken_once(serve):
    server, client = serve()
    memory = ServerMemory(client, is_supported=True)

    memory.release(in_flight=0)
    memory.release(in_flight=0)
    memory.resume((MemoryTag.WEIGHTS,))
    assert memory.released == {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}
    memory.resume()
    memory.resume()

    assert [body["tags"] for _, body in server.calls] == [
        ["cuda_graph", "kv_cache", "weights"],
        ["weights"],
        ["cuda_graph", "kv_cache"],
    ]
    assert memory.released == frozenset()


def test_memory_in_use_is_not_asked_for(serve):
    """SGLang would end the server."""
    server, client = serve()

    with pytest.raises(ValueError, match="3 requests in flight"):
        ServerMemory(client, is_supported=True).release(in_flight=3)
    with pytest.raises(ValueError, match="no memory saver"):
        ServerMemory(client, is_supported=False).release(in_flight=0)

    assert server.paths == []


@pytest.mark.parametrize(("step", "path"), [("release", "/release"), ("resume", "/resume")])
def test_memory_that_does_not_come_back_is_doubt(serve, step, path):
    server, client = serve()
    server.break_at(f"{path}_memory_occupation", "close")
    memory = ServerMemory(client, is_supported=True)

    def lend() -> None:
        memory.release(in_flight=0)
        memory.resume()

    with pytest.raises(SglangUpdateError) as caught:
        lend()

    assert caught.value.step == step
