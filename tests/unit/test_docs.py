"""The documentation leads to files that exist, and the tour to all of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
CODE = ("launcher", "relax_actor", "transport", "tests", "benchmarks", "examples")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_into_a_page_leads_to_a_heading_of_it(page):
    links = [
        ((page.parent / file) if file else page, anchor) for file, anchor in ANCHOR.findall(page.read_text())
    ]
    assert not [(file, anchor) for file, anchor in links if anchor not in anchors(file.read_text())]


def anchors(text: str) -> list[str]:
    """Return what the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_tour_names_every_module():
    tour = (ROOT / "docs" / "tour.md").read_text().replace("\\", "")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|\[[^]]+\]", tour))))
    modules = [
        file for name in ("launcher", "relax_actor", "transport") for file in (ROOT / name).rglob("*.py")
    ]
    assert not [file for file in modules if file.name != "__init__.py" and file.stem not in words]


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        targets = ((page.parent / link).resolve() for link in LINK.findall(page.read_text()))
        pages = [below for each in targets for below in ([each] if each.is_file() else each.glob("*.md"))]
        new = {each for each in pages if each.suffix == ".md"} - seen
        seen |= new
        waiting += new
    assert set(PAGES) - seen - {ROOT / "README.md"} == set()


def test_every_event_is_explained():
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text()
    known = {
        kind for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for kind in re.findall(r"\w+", row)
    }
    files = (ROOT / "relax_actor").rglob("*.py")
    said = {kind for file in files for kind in re.findall(r"\.emit\(\s*\"(\w+)\"", file.read_text())}
    assert len(said) > 40
    assert said - known == set()


def test_every_field_of_an_event_is_explained():
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| (.*) \|$", page, re.MULTILINE)
    known = {
        kind: set(re.findall(r"\w+", text)) for kinds, text in rows for kind in re.findall(r"\w+", kinds)
    }
    calls = [
        (call.args[0].value, {word.arg for word in call.keywords if word.arg})
        for file in (ROOT / "relax_actor").rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "emit"
        if call.args and isinstance(call.args[0], ast.Constant)
    ]
    assert len(calls) > 40
    assert not [(kind, fields - known[kind]) for kind, fields in calls if fields - known[kind]]


def test_every_page_that_the_code_names_is_there():
    files = [file for name in CODE for file in (ROOT / name).rglob("*.py")]
    named = {page for file in files for page in re.findall(r"docs/[\w/-]+\.md", file.read_text())}
    assert named
    assert not [page for page in named if not (ROOT / page).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_is_there(page):
    """As `folder/name.py`, or as `folder/name.py: what` of it."""
    files = [f"/{file.relative_to(ROOT)}" for name in CODE for file in (ROOT / name).rglob("*.py")]
    named = re.findall(r"`([\w.]+(?:/[\w.]+)+\.py)(?:: (\w+))?", page.read_text())
    missing = []
    for path, what in named:
        found = [file for file in files if file.endswith(f"/{path}")]
        if not found or (what and not any(what in (ROOT / file[1:]).read_text() for file in found)):
            missing.append((path, what))
    assert not missing


def test_every_dependency_has_its_reason():
    decision = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text()
    table = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    names = re.findall(r'"([a-z-]+)', table)
    assert names
    assert not [name for name in names if f"`{name}`" not in decision]
