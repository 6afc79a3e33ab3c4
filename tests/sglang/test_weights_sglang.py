"""Policy versions in a real SGLang server on the CPU: by each route and in each mode, and what they sample.

One server for all tests; every test leaves it going on, with a whole version in it.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_client import AnswerError, PlainClient
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relax_actor.dcs import PolicyPublisher
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.server import Server as EngineServer
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.weights import (
    Deadlines,
    SglangUpdateError,
    UpdateMode,
    Updater,
    UpdateRoute,
    UpdateSettings,
    as_sampled,
)
from relax_actor.engines.sglang.weights.disk import SharedMemoryFiles
from relax_actor.ids import PolicyVersion
from transport.shm import ShmSpace

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PROMPT = [1, *range(20, 60)]
CLOSE = 1e-5  # of log-probs in float32
SMALL = 40_000
"""Bytes of a bucket, so that there are several of them."""


@dataclass(kw_only=True)
class Server:
    """The server, what it can do, and the last version anybody gave it."""

    client: PlainClient
    version: tuple[int, ...]
    model_path: Path
    tp: int = 1
    device: str = "cpu"
    installed: int = 0
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def weight_sessions(self) -> bool:
        return self.version >= (0, 5, 21)

    @property
    def retract(self) -> bool:
        return self.version >= (0, 5, 21)

    def next_version(self) -> PolicyVersion:
        """Make other weights under a higher number: far enough from all others to be told by log-probs."""
        self.installed += 1
        generator = torch.Generator().manual_seed(self.installed)
        self.states[self.installed] = {
            name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(self.model_path / "model.safetensors").items()
        }
        return PolicyVersion(self.installed)

    def begin(self, prompt: list[int], tokens: int, version: object = "") -> "Future[Any]":
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        body |= {"rid": uuid.uuid4().hex, "extra_key": str(version)}
        return self.client.start("/generate", body, deadline_s=120)

    def model(self, version: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        model.load_state_dict(self.states[version], strict=False)
        return model.eval()


@pytest.fixture(scope="module")
def server(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> Iterator[Server]:
    settings = ServerSettings(
        model=str(tiny_model.path), python=sglang_python, context_tokens=512, slots=16, dtype="float32"
    )
    with contextlib.ExitStack() as stack:
        started = EngineServer(settings, tmp_path_factory.mktemp("sglang") / "server.log")
        stack.callback(started.kill)
        found = started.await_serving(Client(started.url), progress=lambda _: None)
        client = PlainClient(int(started.url.rpartition(":")[2]))
        stack.callback(client.close)
        made = Server(client=client, version=found.version, model_path=tiny_model.path)
        made.begin(PROMPT[:8], 1).result(60)
        yield made


@pytest.fixture
def updater_of(server: Server) -> Iterator[Callable[..., Updater]]:
    """Makes updaters, and closes them."""
    with contextlib.ExitStack() as stack:

        def made(
            route: UpdateRoute = UpdateRoute.IPC, *, files: tuple[Any, ...] = (), **fields: Any
        ) -> Updater:
            settings = UpdateSettings(
                bucket_bytes=SMALL, routes=(route,), deadlines=Deadlines(step_s=60.0), **fields
            )
            updater = Updater(server.client, server, settings, files=files)
            stack.callback(updater.close)
            return updater

        yield made


def test_buckets_by_their_bytes_are_what_is_sampled_from(server: Server, updater_of: Any) -> None:
    """The route `ipc`, as it is on a CPU."""
    version = server.next_version()

    report = updater_of().update(version, server.states[version].items(), mode=UpdateMode.IN_PLACE)

    assert report.buckets > 2
    assert report.nbytes == sum(tensor.nbytes for tensor in server.states[version].values())
    assert _gap(server, version, _sampled(server, version)) < CLOSE


def test_dummy_weights_are_far_from_the_policy(server: Server, updater_of: Any) -> None:
    """Log-probs would show it if another version were in the server."""
    version = server.next_version()
    updater_of().update(version, server.states[version].items(), mode=UpdateMode.IN_PLACE)
    other = server.next_version()

    assert _gap(server, other, _sampled(server, version)) > 1000 * CLOSE


def test_a_broadcast_brings_the_same(server: Server, updater_of: Any) -> None:
    """The route `group`: this process is rank 0 of a gloo group, once joined for all updates."""
    updater = updater_of(UpdateRoute.GROUP)
    for _ in range(2):
        version = server.next_version()

        report = updater.update(version, server.states[version].items(), mode=UpdateMode.IN_PLACE)

        assert report.route is UpdateRoute.GROUP
        assert _gap(server, version, _sampled(server, version)) < CLOSE


def test_the_server_reads_a_version_out_of_shared_memory(
    server: Server, updater_of: Any, tmp_path: Path
) -> None:
    """The route `disk`: a model folder of links to the buckets of the DCS."""
    version = server.next_version()
    space = ShmSpace("sglangweights", tmp_path)
    with contextlib.closing(PolicyPublisher(space, keep=2, bucket_bytes=1 << 20)) as publisher:
        publisher.publish(version, 0, server.states[version].items())
        updater = updater_of(
            UpdateRoute.DISK,
            files=(SharedMemoryFiles(space),),
            model_path=server.model_path,
            scratch=tmp_path / "scratch",
        )

        report = updater.update(version, server.states[version].items(), mode=UpdateMode.IN_PLACE)

    assert report.route is UpdateRoute.DISK
    assert list((tmp_path / "scratch").iterdir()) == []
    assert _gap(server, version, _sampled(server, version)) < CLOSE


def test_requests_go_on_in_place_and_know_which_weights_sampled_each_token(
    server: Server, updater_of: Any
) -> None:
    """Spans agree with the log-probs of both versions, keys and values of the old ones kept."""
    updater, old, new = updater_of(), server.next_version(), server.next_version()
    updater.update(old, server.states[old].items(), mode=UpdateMode.IN_PLACE)
    prompts = [[*PROMPT, 60 + number] for number in range(4)]
    running = [server.begin(prompt, 400, old) for prompt in prompts]
    _wait_until_under_way(server)

    updater.update(new, server.states[new].items(), mode=UpdateMode.IN_PLACE)

    answers = [future.result(120) for future in running]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == 400
        first, second = answer["meta_info"]["weight_versions"]
        assert (first["version"], second["version"]) == (str(old), str(new))
        said = [PolicyVersion(int(span["version"])) for span in (first, second)]
        versions = as_sampled([said[0]] * first["end"] + [said[1]] * (400 - first["end"]), old)
        border = versions.count(old)
        assert 1 < border < 400
        expected = _logprobs_across(server, (old, new), prompt, answer["output_ids"], border=border)
        assert _distance(expected, answer) < CLOSE


def test_an_update_by_retraction_prefills_with_the_new_weights(server: Server, updater_of: Any) -> None:
    """Nothing of the old weights' cache is left: later tokens are the new policy's alone."""
    if not server.retract:
        pytest.skip("this SGLang cannot flush under a retract pause")
    updater, old, new = updater_of(), server.next_version(), server.next_version()
    updater.update(old, server.states[old].items(), mode=UpdateMode.IN_PLACE)
    running = server.begin(PROMPT, 300, old)
    _wait_until_under_way(server)

    updater.update(new, server.states[new].items(), mode=UpdateMode.RETRACT)

    answer = running.result(120)
    border = answer["meta_info"]["weight_versions"][0]["end"]
    assert 0 < border < 300
    both = [_logprobs(server.model(each), PROMPT, answer["output_ids"]) for each in (old, new)]
    expected = torch.cat([both[0][:border], both[1][border:]])
    assert _distance(expected, answer) < CLOSE


def test_collected_requests_go_on_as_prefixes(server: Server, updater_of: Any) -> None:
    """`abort`: the owner takes its requests back with their tokens, and brings them again afterwards."""
    updater, old, new = updater_of(), server.next_version(), server.next_version()
    updater.update(old, server.states[old].items(), mode=UpdateMode.ABORT)
    running = server.begin(PROMPT, 400, old)
    _wait_until_under_way(server)
    parts: list[Any] = []

    def collect() -> None:
        server.client.post("/abort_request", {"abort_all": True}, deadline_s=60)
        parts.append(running.result(60))

    report = updater.update(new, server.states[new].items(), mode=UpdateMode.ABORT, on_pause=collect)

    (part,) = parts
    assert part["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(part["output_ids"]) < 400
    assert _gap(server, old, (PROMPT, part)) < CLOSE
    prompt = PROMPT + part["output_ids"]
    rest = server.begin(prompt, 400 - len(part["output_ids"]), new).result(60)
    assert _gap(server, new, (prompt, rest)) < CLOSE
    assert 0 < report.paused_s <= report.seconds


def test_an_update_that_breaks_off_is_in_doubt_and_never_the_new_version(
    server: Server, updater_of: Any
) -> None:
    """The server stays paused and says the old version; here it is repaired, a rollout kills it."""
    updater, old, new = updater_of(), server.next_version(), server.next_version()
    updater.update(old, server.states[old].items(), mode=UpdateMode.IN_PLACE)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(server.states[new].items())[:6]
        raise OSError("the source is gone")

    try:
        with pytest.raises(SglangUpdateError, match=r"step `load`.*the source is gone"):
            updater.update(new, broken(), mode=UpdateMode.IN_PLACE)

        assert updater.is_torn
        assert server.client.get("/model_info", deadline_s=60)["weight_version"] == str(old)
        if server.weight_sessions:
            with pytest.raises(SglangUpdateError, match=r"step `begin`.*already open"):
                updater.update(new, server.states[new].items(), mode=UpdateMode.IN_PLACE)
    finally:
        with contextlib.suppress(AnswerError):
            server.client.post("/end_weight_update", deadline_s=30)
        server.client.post("/continue_generation", {"torch_empty_cache": False}, deadline_s=30)
        updater.update(new, server.states[new].items(), mode=UpdateMode.IN_PLACE)


def _wait_until_under_way(server: Server) -> None:
    """Wait for a dozen tokens of a request that was sent later than those that are to be in their middle."""
    server.begin(PROMPT[:8], 12, "probe").result(60)


def _sampled(server: Server, version: int) -> tuple[list[int], Any]:
    return PROMPT, server.begin(PROMPT, 24, version).result(60)


def _gap(server: Server, version: int, sample: tuple[list[int], Any]) -> float:
    """Return the largest distance of a sample's log-probs from those of transformers."""
    prompt, answer = sample
    return _distance(_logprobs(server.model(version), prompt, answer["output_ids"]), answer)


def _distance(expected: torch.Tensor, answer: Any) -> float:
    reported = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    return (expected - reported).abs().max().item()


@torch.no_grad()
def _logprobs(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return _of_tokens(logits, output)


@torch.no_grad()
def _logprobs_across(
    server: Server, versions: tuple[int, int], prompt: list[int], output: list[int], *, border: int
) -> torch.Tensor:
    """Decode with the old weights to the border, and on from their keys and values with the new ones."""
    before = prompt + output[: border - 1]
    past = server.model(versions[0])(torch.tensor([before]), use_cache=True)
    first = _of_tokens(past.logits[0, len(prompt) - 1 :], output[:border])
    after = server.model(versions[1])(
        torch.tensor([output[border - 1 : -1]]), cache=past.past_key_values, use_cache=True
    )
    return torch.cat([first, _of_tokens(after.logits[0], output[border:])])


def _of_tokens(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    table = torch.log_softmax(logits.float(), -1)
    return table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
