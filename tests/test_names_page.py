"""The page of the models and cards that are known by name."""

from pathlib import Path

import pytest

from tightfit.cli.named import names_page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "names.md"


@pytest.mark.keeps("published-model-named-spelling")
def test_the_page_is_made_from_the_tables():
    assert PAGE.read_text("utf-8") == names_page(), "run python -m tightfit.cli.named > docs/names.md"
