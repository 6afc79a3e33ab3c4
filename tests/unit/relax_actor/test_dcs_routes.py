"""Which routes are tried, in which order, and what a puller does when one fails."""

import contextlib

import pytest

from relax_actor.dcs.manifest import Manifest, PolicyCorruptError
from relax_actor.dcs.puller import NoRouteError, PolicyPuller
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.replica_states import (
    SAMPLING,
    TABLE,
    IllegalWeightsMoveError,
    WeightsState,
    WeightsTrigger,
    diagram,
    move,
)
from relax_actor.dcs.routes import FIRST_REST_S, LONGEST_REST_S, Route, RouteBook, targets
from relax_actor.dcs.source import SourceUnavailableError
from transport.clock import ManualClock

SHM, PEER, DISK = Route.SHARED_MEMORY, Route.PEER, Route.DISK


def test_routes_are_tried_best_first_whatever_the_order_they_are_given_in():
    assert RouteBook([DISK, SHM, Route.CUDA_IPC]).order(7, 0, is_urgent=False) == (Route.CUDA_IPC, SHM, DISK)


def test_a_route_that_failed_rests_and_is_the_last_resort_of_the_urgent():
    book = RouteBook([SHM, DISK])
    book.failed(SHM, 7, 10.0)

    assert book.order(7, 10.0, is_urgent=False) == (DISK,)
    assert book.order(7, 10.0, is_urgent=True) == (DISK, SHM)
    assert book.order(7, 10.0 + FIRST_REST_S, is_urgent=False) == (SHM, DISK)
    assert book.order(8, 10.0, is_urgent=False) == (SHM, DISK)  # what was damaged was that version


def test_a_rest_doubles_up_to_a_limit_and_a_success_ends_it():
    book = RouteBook([SHM])
    rests = []
    for _ in range(40):
        book.failed(SHM, 7, 0.0)
        rests.append(next(t for t in (0.01 * 2**k for k in range(20)) if book.order(7, t, is_urgent=False)))
    assert rests == sorted(rests)
    assert book.order(7, LONGEST_REST_S - 0.1, is_urgent=False) == ()
    assert book.order(7, LONGEST_REST_S, is_urgent=False) == (SHM,)

    book.succeeded(SHM)
    assert book.order(7, 0.0, is_urgent=False) == (SHM,)
    book.failed(SHM, 7, 0.0)
    assert book.order(7, FIRST_REST_S, is_urgent=False) == (SHM,)


@pytest.mark.parametrize(
    ("offers", "installed", "floor", "expected"),
    [
        ([3, None, 5, 3], None, None, (5, 3)),
        ([3, 5, 4], 4, 4, (5,)),
        ([3, 5, 4], None, 4, (5, 4)),  # torn: back to what it had, and no further
        ([3], 4, 4, ()),
        ([], None, None, ()),
    ],
)
def test_versions_worth_a_pull_are_newest_first_and_never_behind(offers, installed, floor, expected):
    assert targets(offers, installed, floor) == expected


class Source:
    """A source that fails on purpose: when it is opened, or after so many tensors."""

    def __init__(self, route, *, opening=None, after=None, newest=7):
        self.route, self._opening, self._after, self._newest = route, opening, after, newest
        self.opened = self.closed = 0
        self.manifest = None

    def latest(self):
        return self._newest

    @contextlib.contextmanager
    def open(self, version):
        if self._opening:
            raise self._opening
        self.opened += 1
        self.manifest = Manifest(version=version, step=0, tensors=(), buckets=())
        try:
            yield self
        finally:
            self.closed += 1

    def tensors(self):
        for index in range(4):
            if index == self._after:
                raise PolicyCorruptError(self.manifest.version, index, "a", "b")
            yield f"t{index}", self.route


def copied(into):
    def install(_, tensors):
        for name, value in tensors:
            into[name] = value

    return install


def test_the_best_route_is_used_and_its_version_is_closed_again():
    shm, disk, weights = Source(SHM), Source(DISK), {}
    pulled = PolicyPuller([disk, shm]).pull(copied(weights), 7)

    assert (pulled.route, pulled.version, pulled.failures) == (SHM, 7, ())
    assert set(weights.values()) == {SHM}
    assert (shm.opened, shm.closed, disk.opened) == (1, 1, 0)


@pytest.mark.parametrize(
    "failing",
    [
        {"opening": SourceUnavailableError(SHM, "gone")},
        {"opening": PolicyMissingError(7, 6)},
        {"opening": PolicyCorruptError(7, 0, "a", "b")},
        {"after": 0},
        {"after": 3},
    ],
    ids=str,
)
def test_after_any_failure_of_a_route_the_next_one_brings_all_of_it(failing):
    shm, weights, said = Source(SHM, **failing), {}, []
    puller = PolicyPuller([shm, Source(DISK)], on_failure=lambda _, failure: said.append(failure))
    pulled = puller.pull(copied(weights), 7)

    assert pulled.route == DISK
    assert set(weights.values()) == {DISK}
    assert shm.opened == shm.closed
    assert list(pulled.failures) == said
    assert said[0].route == SHM


def test_no_route_is_an_error_that_lists_every_one_and_why():
    sources = [
        Source(SHM, after=2),
        Source(PEER, opening=SourceUnavailableError(PEER, "nobody answers")),
        Source(DISK, opening=PolicyMissingError(7, 4, "on disk")),
    ]
    with pytest.raises(NoRouteError) as caught:
        PolicyPuller(sources).pull(copied({}), 7)

    assert [failure.route for failure in caught.value.failures] == [SHM, PEER, DISK]
    assert str(caught.value).splitlines() == [
        "no route brought policy version 7:",
        "  shared_memory: bucket 2 of policy version 7 is corrupt: expected a, found b",
        "  peer: route peer: nobody answers",
        "  disk: policy version 7 is not on disk; the newest is 4",
    ]


def test_a_corrupt_route_rests_and_one_that_only_lacks_the_version_does_not():
    clock = ManualClock()
    shm, disk = Source(SHM, after=0), Source(DISK, opening=PolicyMissingError(7, 4))
    puller = PolicyPuller([shm, disk], clock=clock)
    for _ in range(3):
        with pytest.raises(NoRouteError) as caught:
            puller.pull(copied({}), 7, is_urgent=False)
    assert shm.opened == 1
    assert [failure.route for failure in caught.value.failures] == [DISK]

    clock.advance(FIRST_REST_S)
    with pytest.raises(NoRouteError):
        puller.pull(copied({}), 7, is_urgent=False)
    assert shm.opened == 2


def test_when_all_routes_rest_the_error_says_so():
    puller = PolicyPuller([Source(SHM, after=0)], clock=ManualClock())
    for says in ["corrupt", "all of them rest"]:
        with pytest.raises(NoRouteError, match=says):
            puller.pull(copied({}), 7, is_urgent=False)


def test_what_is_wrong_with_the_replica_is_not_the_routes_fault():
    def install(_, tensors):
        raise KeyError("the model has no weight `t0`")

    shm = Source(SHM)
    with pytest.raises(KeyError):
        PolicyPuller([shm, Source(DISK)]).pull(install, 7)
    assert shm.closed == 1


def test_each_source_says_its_newest_version():
    sources = [Source(SHM, newest=None), Source(DISK, newest=3)]
    assert PolicyPuller(sources).latest() == {DISK: 3}


def test_torn_weights_are_never_sampled_and_only_a_whole_install_ends_that():
    ways_out = {trigger: after for (state, trigger), after in TABLE.items() if state is WeightsState.TORN}
    assert ways_out == {
        WeightsTrigger.COPY: WeightsState.INSTALLING,
        WeightsTrigger.NO_ROUTE: WeightsState.FAILED,
        WeightsTrigger.ASLEEP: WeightsState.EMPTY,
    }
    into_sampling = {
        (state, trigger) for (state, trigger), after in TABLE.items() if after is WeightsState.SERVING
    }
    assert into_sampling == {(WeightsState.INSTALLING, WeightsTrigger.WHOLE)}
    assert WeightsState.TORN not in SAMPLING
    assert WeightsState.INSTALLING not in SAMPLING


def test_every_move_is_in_the_table_or_refused_by_name():
    for state in WeightsState:
        for trigger in WeightsTrigger:
            if (state, trigger) in TABLE:
                assert move(state, trigger) is TABLE[state, trigger]
            else:
                with pytest.raises(IllegalWeightsMoveError, match=f"weights that are {state} .*`{trigger}`"):
                    move(state, trigger)


def test_the_page_shows_the_table_as_it_is(request):
    page = (request.config.rootpath / "docs/concepts/dcs.md").read_text()
    assert f"```mermaid\n{diagram()}\n```" in page
