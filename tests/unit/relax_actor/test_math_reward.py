"""The rule-checked rewards: which answer counts, and when it equals the label."""

import pytest

from relax_actor.rewards.math import exact_reward, math_reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [(" 14\n", "14", 1.0), ("14", " 14", 1.0), ("14.", "14", 0.0), ("", "14", 0.0)],
)
def test_exact_wants_the_same_text(response, label, reward):
    assert exact_reward(response=response, label=label) == reward


@pytest.mark.parametrize(
    ("response", "label"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5"),
        ("12 apples, so 13 in total.", "13"),
        ("The answer is $x^2+2x+1$", "(x+1)^2"),
        (r"\boxed{3\sqrt{2}}", r"3\sqrt{2}"),
        ("#### 1,234", "He has 5 and 6.\n#### 1234"),
        ("72 dollars", "72"),
        (r"\boxed{12} and a box cut off \boxed{13", "12"),
        (r"\boxed{(1,2)}", "(1, 2)"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{x=5}", "5"),
        ("\ud83d\0 7", "7"),
        ("blue", "blue"),
    ],
)
def test_an_answer_that_equals_the_label_is_right(response, label):
    assert math_reward(response=response, label=label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("It is 12 or 13", "12"),
        (r"\boxed{12}, no, \boxed{13}", "12"),
        (r"13 \boxed{12}", "13"),
        ("3", r"3\sqrt{2}"),
        ("", ""),
        ("", "7"),
        ("nothing", "7"),
        ("1/0", "7"),
        (r"\boxed{" + "9" * 1900 + "}", "7"),
        ("7" * 5000, "7"),
        (r"\boxed{", "7"),
    ],
)
def test_any_other_answer_is_wrong(response, label):
    """Only the last answer counts: naming many must not pay."""
    assert math_reward(response=response, label=label) == 0.0
