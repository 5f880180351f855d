"""The worlds that answer the questions of this folder, started once for all that pytest has collected."""

import os
from pathlib import Path

import pytest

from integration_tests.fsdp1.asking import Answers, Question


@pytest.fixture(scope="session")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """One world for each number of ranks; the workers of one pytest run share them."""
    questions: dict[int, list[Question]] = {}
    for item in request.session.items:
        function = getattr(item, "function", None)
        if hasattr(function, "questions"):
            questions.setdefault(function.ranks, []).extend(function.questions)
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = Path(root, "fsdp1-answers")
    root.mkdir(exist_ok=True)
    return Answers(questions, root)
