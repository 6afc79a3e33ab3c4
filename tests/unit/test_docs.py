"""The documentation leads to files that exist, and the tour to all of them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
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


def test_every_dependency_has_its_reason():
    decision = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text()
    table = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    names = re.findall(r'"([a-z-]+)', table)
    assert names
    assert not [name for name in names if f"`{name}`" not in decision]
