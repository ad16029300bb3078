"""Files that the docs tell their readers to save, for tests."""

import re
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[1] / "docs"


def saved_block(name: str, page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The block `# name.py` of a page as a file that can be imported, under a name of its own for each test."""
    code = re.search(rf"```python\n(# {name}\.py\n.*?)```", (_DOCS / f"{page}.md").read_text("utf-8"), re.DOTALL)
    assert code is not None
    monkeypatch.syspath_prepend(str(folder))
    file = folder / f"{name}_{folder.name}.py"
    file.write_text(code[1])
    return file
