"""The recipes for a model on a device, as `tightfit.fit` returns them."""

import json
from pathlib import Path

from tightfit.recipes.records import RecipesRecord


class Recipes(RecipesRecord):
    """Recipes that can be printed and written, best first."""

    def __str__(self) -> str:
        from tightfit.recipes.table import describe_recipes

        return describe_recipes(self)

    def to_json(self, path: str | Path) -> None:
        """Write the recipes to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
