"""The engine `sglang` where it only thinks: states, command line, answers, what a server says of itself."""

import base64
import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from relax_actor.devices import replica_groups, visible_names
from relax_actor.engines.errors import LogitsError
from relax_actor.engines.randomness import sample_seed
from relax_actor.engines.sglang import states
from relax_actor.engines.sglang.answers import Span, parse, policy_version, token_versions, unpack_routes
from relax_actor.engines.sglang.boot import last_word, phases
from relax_actor.engines.sglang.capabilities import capabilities, version_of
from relax_actor.engines.sglang.errors import EngineDownError
from relax_actor.engines.sglang.server import START_S
from relax_actor.engines.sglang.settings import (
    QUICK_START,
    Ports,
    ServerSettings,
    command,
    environment,
    meeting_address,
)
from relax_actor.engines.sglang.states import TABLE, EngineState, EngineTrigger, IllegalEngineMoveError
from relax_actor.engines.sglang.updating import update_mode_of
from relax_actor.errors import PartialRolloutFormatError
from relax_actor.protocol import FinishReason

PAGE = Path(__file__).parents[4] / "docs" / "concepts" / "sglang.md"
PORTS = Ports(http=7001, nccl=7002)
KEY = (3, 1)
LOGPROBS = "meta_info.output_token_logprobs"


@pytest.mark.parametrize("state", EngineState)
@pytest.mark.parametrize("trigger", EngineTrigger)
def test_a_move_is_in_the_table_or_raises(state, trigger):
    if (state, trigger) in TABLE:
        assert states.move(state, trigger) is TABLE[state, trigger]
        return
    with pytest.raises(IllegalEngineMoveError, match=f"{state} has no move `{trigger}`"):
        states.move(state, trigger)


def test_whatever_works_can_be_doubted_and_only_a_start_leads_out_of_down():
    assert all((state, EngineTrigger.DOUBT) in TABLE for state in EngineState if state != EngineState.DOWN)
    assert [trigger for state, trigger in TABLE if state is EngineState.DOWN] == [EngineTrigger.START]


def test_only_a_whole_update_makes_ready():
    assert [move for move, after in TABLE.items() if after is EngineState.READY] == [
        (EngineState.UPDATING, EngineTrigger.WHOLE)
    ]


def test_the_page_shows_the_diagram_of_the_code():
    assert f"```mermaid\n{states.diagram()}\n```" in PAGE.read_text()


def settings(**changes):
    base = {"model": "/m", "python": "/py", "context_tokens": 100, "slots": 4}
    return ServerSettings(**base | changes)


def value(words, name):
    return words[len(words) - words[::-1].index(name)]


def test_a_server_gets_its_ports_and_starts_without_weights_and_tokenizer():
    words = command(settings(), PORTS)
    assert words[:2] == ["/py", str(QUICK_START)]
    plain = command(settings(quick_start=False), PORTS)
    assert plain == ["/py", "-m", "sglang.launch_server", *words[2:]]
    assert value(words, "--port") == "7001"
    assert value(words, "--nccl-port") == "7002"
    assert (value(words, "--load-format"), value(words, "--weight-version")) == ("dummy", "uninit")
    assert "--skip-tokenizer-init" in words
    assert value(words, "--host") == "127.0.0.1"


def test_the_nodes_of_a_server_are_told_where_they_meet():
    assert not {"--nnodes", "--dist-init-addr"} & set(command(settings(tp=4), PORTS))
    words = command(settings(tp=4, nodes=2, node=1, meeting=meeting_address("10.0.0.1", 7003)), PORTS)
    assert (value(words, "--nnodes"), value(words, "--node-rank")) == ("2", "1")
    assert (value(words, "--dist-init-addr"), value(words, "--tp-size")) == ("10.0.0.1:7003", "4")
    assert 0 < int(value(words, "--dist-timeout")) < START_S
    assert meeting_address("fd00::1", 7003) == "[fd00::1]:7003"
    environ = environment(settings(nodes=2, address="10.0.0.1"), {}, own_python="/py")
    assert environ["SGLANG_HOST_IP"] == "10.0.0.1"
    assert "SGLANG_HOST_IP" not in environment(settings(address="10.0.0.1"), {}, own_python="/py")


def test_a_server_has_room_for_a_request_more_and_for_what_it_keeps_of_every_request():
    words = command(settings(), PORTS)
    assert value(words, "--max-running-requests") == "5"
    assert value(words, "--context-length") == "108"


def test_a_machine_with_gpus_keeps_sglangs_own_choice_of_kernels():
    words = command(settings(gpus=("2",)), PORTS)
    assert not {"--attention-backend", "--sampling-backend", "--disable-cuda-graph", "--device"} & set(words)
    assert "--disable-custom-all-reduce" not in words


def test_several_gpus_never_use_multicast():
    one = settings(gpus=("2", "3"), tp=2)
    words, env = command(one, PORTS), environment(one, {}, own_python="/py")
    assert {"--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"} <= set(words)
    assert (env["CUDA_VISIBLE_DEVICES"], env["NCCL_NVLS_ENABLE"]) == ("2,3", "0")


def test_a_cpu_is_asked_for_by_flags_and_environment():
    two = settings(tp=2)
    assert value(command(two, PORTS), "--attention-backend") == "torch_native"
    env = environment(two, {}, own_python="/py")
    assert (env["SGLANG_USE_CPU_ENGINE"], env["SGLANG_CPU_OMP_THREADS_BIND"]) == ("1", "0|1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deterministic": True}, ["--enable-deterministic-inference"]),
        ({"memory_saver": True}, ["--enable-memory-saver"]),
        ({"routed_experts": True}, ["--enable-return-routed-experts"]),
        ({"mem_fraction": 0.7}, ["--mem-fraction-static", "0.7"]),
        ({"stream_tokens": 16}, ["--incremental-streaming-output", "--stream-interval", "16"]),
    ],
)
def test_what_is_switched_on_is_said_and_nothing_else(changes, words):
    said, plain = command(settings(gpus=("0",), **changes), PORTS), command(settings(gpus=("0",)), PORTS)
    assert [word for word in said if word not in plain] == words


def test_the_users_words_come_last_and_the_users_environment_wins():
    one = settings(args=("--context-length", "7"), env={"NCCL_NVLS_ENABLE": "1"})
    assert command(one, PORTS)[-2:] == ["--context-length", "7"]
    assert environment(one, {}, own_python="/py")["NCCL_NVLS_ENABLE"] == "1"


def test_the_mark_of_the_actor_is_passed_on_and_our_module_path_only_to_our_own_interpreter():
    own = {"RELAX_ACTOR_MARK": "r/a/1", "PYTHONPATH": "/ours"}
    assert environment(settings(), own, own_python="/py")["PYTHONPATH"] == "/ours"
    other = environment(settings(), own, own_python="/other")
    assert "PYTHONPATH" not in other
    assert other["RELAX_ACTOR_MARK"] == "r/a/1"


def test_a_quick_start_keeps_compiled_modules_unless_the_user_says_otherwise():
    own, name = {"PYTHONDONTWRITEBYTECODE": "1"}, "PYTHONDONTWRITEBYTECODE"
    assert name not in environment(settings(), own, own_python="/py")
    assert environment(settings(env=own), own, own_python="/py")[name] == "1"
    assert environment(settings(quick_start=False), own, own_python="/py")[name] == "1"


@pytest.mark.parametrize(
    ("version", "spans", "sessions"),
    [("0.5.17", False, False), ("0.5.19", True, False), ("0.5.21.post1", True, True), ("0.5.23", True, True)],
)
def test_what_a_server_can_do_follows_from_its_version(version, spans, sessions):
    found = capabilities({"version": version, "device": "cpu"})
    assert (found.version_spans, found.weight_sessions, found.retract) == (spans, sessions, sessions)


@pytest.mark.parametrize(
    ("version", "setting", "mode"),
    [
        ("0.5.17", "auto", "abort"),
        ("0.5.17", "in_place", None),
        ("0.5.19", "auto", "in_place"),
        ("0.5.19", "retract", None),
        ("0.5.21", "retract", "retract"),
        ("0.5.23", "auto", "in_place"),
        ("0.5.23", "abort", "abort"),
    ],
)
def test_requests_cross_an_update_only_where_the_server_can_do_it(version, setting, mode):
    found = capabilities({"version": version})
    if mode is None:
        with pytest.raises(EngineDownError, match=re.escape(version)):
            update_mode_of(setting, found)
    else:
        assert update_mode_of(setting, found) == mode


def test_what_a_server_can_do_follows_from_how_it_was_started():
    found = capabilities(
        {
            "version": "0.5.23",
            "tp_size": 4,
            "enable_memory_saver": True,
            "enable_return_routed_experts": True,
            "enable_deterministic_inference": True,
            "internal_states": [{"memory_usage": {"token_capacity": 512}}],
        }
    )
    assert (found.tp, found.memory_saver, found.routed_experts, found.deterministic) == (4, True, True, True)
    assert (found.kv_tokens, found.device) == (512, "cuda")


def test_a_version_nobody_can_read_can_do_nothing():
    assert version_of("strange") == ()
    assert not capabilities({"version": "strange"}).version_spans
    assert capabilities({}).kv_tokens == 0


def answer(tokens=(5, 6), finish="length", **meta):
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": {"type": finish},
            "weight_version": "2",
            "output_token_logprobs": [[-0.25, token, None] for token in tokens],
        }
        | meta,
    }


def test_an_answer_is_read():
    read = parse(answer(weight_versions=[{"version": "2", "start": 0, "end": 2}], cached_tokens=3), KEY)
    assert (read.tokens, read.logprobs, read.finish) == ((5, 6), (-0.25, -0.25), FinishReason.LENGTH)
    assert read.spans == (Span(version="2", start=0, end=2),)
    assert read.cached_tokens == 3


def test_a_request_cut_off_in_the_queue_has_no_tokens_and_nothing_about_them():
    read = parse({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "m"}}}, KEY)
    assert (read.tokens, read.finish, read.message) == ((), FinishReason.ABORT, "m")


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (7, "output_ids"),
        ({"output_ids": []}, "meta_info"),
        ({"output_ids": 7, "meta_info": {}}, "meta_info"),
        ({"output_ids": [], "meta_info": 7}, "meta_info"),
        (answer(finish_reason=None), "meta_info.finish_reason"),
        (answer(finish="odd"), "meta_info.finish_reason"),
        (answer(output_token_logprobs=[[-0.25, 5, None]]), "meta_info.output_token_logprobs"),
        (
            answer(output_token_logprobs=[[-0.25, 5, None], [-1.0, 9, None]]),
            "meta_info.output_token_logprobs",
        ),
        (
            answer(output_token_logprobs=[[-0.25, 5, None], ["odd", 6, None]]),
            "meta_info.output_token_logprobs",
        ),
        *(
            (answer(output_token_logprobs=[[-0.25, 5, None], odd]), "meta_info.output_token_logprobs")
            for odd in ([], [-1.0], {"6": -1.0}, None, 7, "-6", [True, 6, None])
        ),
        (answer(output_token_logprobs=7), "meta_info.output_token_logprobs"),
        (answer(output_token_logprobs={"5": 0}), "meta_info.output_token_logprobs"),
        (answer(weight_versions=[{"version": "2"}]), "meta_info.weight_versions"),
    ],
)
def test_an_answer_that_makes_no_sample_is_refused_by_its_field(bad, field):
    with pytest.raises(PartialRolloutFormatError, match="sample 1 of group 3") as caught:
        parse(bad, KEY)
    assert (caught.value.field, caught.value.sample) == (field, KEY)


def test_a_log_prob_that_is_not_a_number_is_the_models_fault():
    with pytest.raises(LogitsError) as caught:
        parse(answer(output_token_logprobs=[[-0.25, 5, None], [None, 6, None]]), KEY)
    assert caught.value.rows == [1]


def test_an_event_in_the_middle_of_a_stream_has_no_reason_to_finish():
    assert parse(answer(finish_reason=None), KEY, is_event=True).finish is None


@pytest.mark.parametrize(
    "spans", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 2)], [(0, 3), (3, 1)], []], ids=str
)
def test_spans_with_gaps_or_overlaps_are_refused(spans):
    with pytest.raises(PartialRolloutFormatError):
        token_versions([Span(version="4", start=a, end=b) for a, b in spans], 3, KEY)


def test_spans_say_the_version_of_every_token():
    spans = [Span(version="4", start=0, end=2), Span(version="5", start=2, end=3)]
    assert token_versions(spans, 3, KEY) == [4, 4, 5]


@pytest.mark.parametrize("text", ["uninit", "", "-1", "default"])
def test_weights_that_are_no_policys_are_no_version(text):
    with pytest.raises(PartialRolloutFormatError, match="no policy version"):
        policy_version(text, KEY)


def test_routed_experts_are_tokens_by_layers_by_choices():
    routes = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    text = base64.b64encode(routes.tobytes()).decode()
    assert np.array_equal(unpack_routes(text, (3, 2), KEY), routes)
    with pytest.raises(PartialRolloutFormatError, match="12 numbers"):
        unpack_routes(text, (5, 1), KEY)


LOG = """\
/x.py:3: UserWarning: nothing
[2026-11-30 01:00:05] server_args={'a': 1}
[2026-11-30 01:00:17 TP0] Load weight begin. avail mem=1 GB
[2026-11-30 01:00:18 TP0] Load weight end. elapsed=1
[2026-11-30 01:00:19 TP0] Memory pool end. avail mem=1 GB
[2026-11-30 01:00:25 TP0] Capture cuda graph end. Time elapsed: 6 s
requests.exceptions.ConnectionError: a warm-up of its own
[2026-11-30 01:00:26] INFO:     Uvicorn running on http://127.0.0.1:1
"""


def test_the_parts_of_a_start_are_read_out_of_the_log():
    since = datetime.strptime("2026-11-30 01:00:00", "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
    took = phases(LOG.splitlines(), since)
    assert took == {"imports": 5, "spawn": 12, "weights": 1, "kv_cache": 1, "graphs": 6, "ready": 1}
    assert phases(LOG.splitlines()[:3], since) == {"imports": 5, "spawn": 12}
    assert phases([], since) == {}


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("", "Uvicorn running"),
        ("torch.OutOfMemoryError: CUDA out of memory\n  in x\n", "torch.OutOfMemoryError: CUDA"),
        ("[2026-11-30 01:00:27] ValueError: bad\nbye\n", "ValueError: bad"),
        ("bye\n", "bye"),
    ],
)
def test_the_last_word_of_a_log_is_an_error_since_it_served_or_its_last_line(more, word):
    assert word in last_word((LOG + more).splitlines())
    assert last_word([]) == ""


@pytest.mark.parametrize(
    ("setting", "gpus", "size", "groups"),
    [
        ("cpu", 4, 1, [("cpu",)]),
        ("auto", 0, 2, [("cpu",)]),
        ("auto", 1, 1, [("cuda:0",)]),
        ("auto", 4, 1, [("cuda:1",), ("cuda:2",), ("cuda:3",)]),
        ("cuda", 5, 2, [("cuda:1", "cuda:2"), ("cuda:3", "cuda:4")]),
        ("auto", 2, 2, [("cuda:0", "cuda:1")]),
        ("cuda:2", 4, 2, [("cuda:2", "cuda:3")]),
        ("cuda", 0, 1, [("cuda:0",)]),
    ],
)
def test_replicas_have_groups_of_gpus_beside_the_trainers(setting, gpus, size, groups):
    assert replica_groups(setting, gpus, size) == groups


def test_a_server_is_told_gpus_by_the_names_that_this_process_sees_them_under():
    assert visible_names(("cuda:1", "cuda:0"), {"CUDA_VISIBLE_DEVICES": "5,GPU-a"}) == ("GPU-a", "5")
    assert visible_names(("cuda:1",), {}) == ("1",)
    assert visible_names(("cpu",), {"CUDA_VISIBLE_DEVICES": "5"}) == ()


def test_a_samples_seed_is_its_own_and_nonnegative():
    seeds = {sample_seed(seed, group, sample) for seed in (0, 1) for group in (-1, 4) for sample in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(0, 4, 1) == sample_seed(0, 4, 1)
