"""A diagnosis, which can be printed and written as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightfit.recipes.doctor.records import DiagnosisRecord


class Diagnosis(DiagnosisRecord):
    """A diagnosis that can be printed and written."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write the diagnosis to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        from tightfit.recipes.doctor.describe import describe_diagnosis

        return describe_diagnosis(self)
