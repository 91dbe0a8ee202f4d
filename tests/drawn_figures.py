"""What a picture shows: the figures that were drawn, before they became pixels."""

import pytest
from matplotlib.figure import Figure


def drawn_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from now on."""
    figures, save = [], Figure.savefig

    def noting(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", noting)
    return figures


def lines(axis) -> dict[str, list[tuple[float, float]]]:
    """The points of each labelled line of a panel."""
    return {
        line.get_label(): list(zip(*map(list, line.get_data()), strict=True))
        for line in axis.get_lines()
        if not line.get_label().startswith("_")
    }


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def top_of_stack(axis) -> float:
    """The highest point of what is stacked in a panel."""
    return max(path.vertices[:, 1].max() for stack in axis.collections for path in stack.get_paths())
