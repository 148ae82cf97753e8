"""``python -m rollmill_capture.http.reference.generate``: writes the reference into the source tree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rollmill_capture.http.reference.document import openapi_document
from rollmill_capture.http.reference.rendering import markdown


def reference_files(root: Path) -> dict[Path, str]:
    """The generated files below ``root`` with the text that they must have."""
    document = openapi_document()
    return {
        root / "schemas" / "openapi.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        root / "docs" / "http.md": markdown(document),
    }


def write(root: Path) -> None:
    for path, text in reference_files(root).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
