"""Reward functions by name, and what counts as a reward."""

import decimal
import fractions
import sys

import numpy as np
import pytest

from relax_actor.rewards.registry import RewardFunctionError, RewardInput, check_name, resolve
from relax_actor.rewards.value import RewardValueError, as_reward

TASK = RewardInput(
    response=" 4\n", label="4", extra={"k": 1}, origin="rows.jsonl:3", group_id=7, sample_index=2
)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's; return `resolve` for names in it."""
    monkeypatch.setattr("sys.path", list(sys.path))

    def module(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        return lambda function: resolve(f"{name}:{function}", str(tmp_path))

    return module


@pytest.mark.parametrize("name", ["exact", "math"])
def test_shipped_functions_are_found_by_their_names(name):
    assert resolve(name)(TASK) == 1.0


def test_a_function_takes_only_the_keywords_it_wants(module):
    find = module(
        "wants_some", "def few(label, *, group_id): return [label, group_id]\ndef none(): return 3\n"
    )

    assert find("few")(TASK) == ["4", 7]
    assert find("none")(TASK) == 3


def test_a_function_with_double_star_takes_all(module):
    find = module("wants_all", "def everything(response, **rest): return sorted(rest)\n")

    assert find("everything")(TASK) == [
        "extra",
        "finish_reason",
        "group_id",
        "label",
        "origin",
        "sample_index",
    ]


def test_optional_arguments_and_star_arguments_are_left_alone(module):
    find = module("has_defaults", "def f(response, *more, strict=True): return (response, more, strict)\n")

    assert find("f")(TASK) == (" 4\n", (), True)


def test_a_method_of_an_object_may_be_named(module):
    find = module("has_object", "class J:\n    def score(self, label): return label\njudge = J()\n")

    assert find("judge.score")(TASK) == "4"


def test_the_users_folder_is_the_last_of_the_path(module, tmp_path):
    before = list(sys.path)

    module("anything", "def f(): return 0\n")("f")

    assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize("name", ["maths", "a:", ":b", ""])
def test_a_name_of_neither_form_is_refused_with_the_known_ones(name):
    with pytest.raises(RewardFunctionError, match="must be `math`, `exact` or `module:function`"):
        check_name(name)


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        ("missing", "names `broken_names:missing`, but broken_names has no `missing`"),
        ("number", "names `broken_names:number`, which is of type int, not a function"),
        ("Class", "which is a class, not a function"),
        ("later", "which is async"),
        ("greedy", "which wants an argument `prompt`"),
        ("positional", "which wants an argument `response`"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(module, function, fact):
    find = module(
        "broken_names",
        "number = 3\nclass Class: pass\nasync def later(response): pass\n"
        "def greedy(response, prompt): pass\ndef positional(response, /): pass\n",
    )

    with pytest.raises(RewardFunctionError, match=fact):
        find(function)


def test_a_module_that_is_missing_is_told_from_one_whose_import_fails(module):
    with pytest.raises(RewardFunctionError, match=r"`not_there.at_all`, which is not found") as caught:
        resolve("not_there.at_all:f")
    assert caught.value.hint == "set run.user_path to the folder it is in"
    with pytest.raises(RewardFunctionError, match="import fails: No module named 'not_there_either'"):
        module("imports_missing", "import not_there_either\n")("f")
    with pytest.raises(RewardFunctionError, match="import fails: ZeroDivisionError: division by zero"):
        module("divides", "1 / 0\n")("f")


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (np.float64(0.25), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (fractions.Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_all_kinds_are_rewards(value, reward):
    assert as_reward(value) == reward
    assert type(as_reward(value)) is float


def test_a_torch_scalar_is_a_reward_and_a_vector_is_none():
    import torch

    assert as_reward(torch.tensor(0.5)) == 0.5
    with pytest.raises(RewardValueError, match=r"Tensor of shape \(1,\)"):
        as_reward(torch.tensor([0.5]))
    with pytest.raises(RewardValueError, match=r"returned Tensor of shape \(\)"):
        as_reward(torch.tensor(1).bool())


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (None, "returned None, where a finite number is wanted"),
        (True, "returned bool True"),
        (np.float64(1) > 0, r"returned bool_? of shape \(\)|returned bool"),
        ("1.0", "returned str '1.0'"),
        (1 + 0j, r"returned complex \(1\+0j\)"),
        ([1.0], r"returned list \[1.0\]"),
        (np.array([1.0, 2.0]), r"returned ndarray of shape \(2,\)"),
        (decimal.Decimal(1), "returned Decimal"),
        (float("nan"), "returned NaN"),
        (np.float32("nan"), "returned NaN"),
        (float("inf"), "returned float inf, beyond float32"),
        (float("-inf"), "returned float -inf, beyond float32"),
        (1e39, r"returned float 1e\+39, beyond float32"),
        (10**400, "returned int inf, beyond float32"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(value, fact):
    """BUGCASES 12: None, NaN and infinities end here."""
    with pytest.raises(RewardValueError, match=fact):
        as_reward(value)
