from pathlib import Path

import pytest

from tests.several.runs import write_files


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("inputs"), layers=1)
