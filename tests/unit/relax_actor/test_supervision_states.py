"""The table of a child's life, and the page that prints it."""

import ast
import re
from pathlib import Path

import pytest

from relax_actor.supervision import states
from relax_actor.supervision.states import ALIVE, TABLE, ChildState, IllegalMoveError, Trigger

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "supervision.md"
EXAMPLES = [
    Path(__file__).with_name(f"test_supervision_{part}.py") for part in ("policy", "faults", "scaling")
]


@pytest.mark.parametrize("state", ChildState)
@pytest.mark.parametrize("trigger", Trigger)
def test_a_move_is_in_the_table_or_raises(state: ChildState, trigger: Trigger) -> None:
    if (state, trigger) in TABLE:
        assert states.move(state, trigger) is TABLE[state, trigger]
        return
    with pytest.raises(IllegalMoveError, match=f"a child that is {state} has no move `{trigger}`") as caught:
        states.move(state, trigger)
    assert (caught.value.state, caught.value.trigger) == (state, trigger)


@pytest.mark.parametrize("state", ChildState)
def test_every_state_can_be_reached_and_left(state: ChildState) -> None:
    assert state in TABLE.values()
    assert state in {before for before, _ in TABLE}


@pytest.mark.parametrize("state", sorted(ALIVE))
def test_whatever_is_alive_is_only_over_when_the_kernel_says_so(state: ChildState) -> None:
    ways_out = {
        trigger for (before, trigger), after in TABLE.items() if before == state and after not in ALIVE
    }

    assert ways_out <= {Trigger.GONE}


def test_the_page_shows_the_table_and_the_diagram_of_the_code() -> None:
    page = PAGE.read_text()

    assert states.table() in page
    assert f"```mermaid\n{states.diagram()}\n```" in page


def test_every_sentence_of_the_page_has_a_test() -> None:
    """A promise of the page is the docstring of a test, and every such docstring is on the page."""
    tests = {
        node.name: ast.get_docstring(node)
        for examples in EXAMPLES
        for node in ast.parse(examples.read_text()).body
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    }
    page = PAGE.read_text()
    promises = [" ".join(item.split()) for item in re.findall(r"^- ((?:.|\n  )+)$", page, re.MULTILINE)]

    assert promises == list(tests.values())
    assert re.findall(r"^test_\w+$", page, re.MULTILINE) == list(tests)
