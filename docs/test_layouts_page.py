"""The tables of padding on the page of layouts are those that the planner makes now."""

import math

import pytest
from each_row import each_row
from layouts_page import MODELS, PAGE, RULES, WORLD_SIZES, cost, row, seconds_to_plan

#: The numbers of parameters that the models' authors tell, in billions.
TOLD = {
    "GPT-2": 0.124,
    "BERT-large": 0.335,
    "ViT-L/16": 0.304,
    "Gemma-7B": 8.54,
    "Qwen2-7B": 7.62,
    "Llama-3-8B": 8.03,
    "Llama-3-70B": 70.55,
    "Mixtral-8x7B": 46.7,
    "DeepSeek-V3": 671.0,
    "Kimi-K2": 1026.0,
}


@pytest.mark.parametrize("title", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_line_of_a_table_is_what_the_planner_makes(name: str, title: str) -> None:
    """Nothing in the tables is edited by hand, and a planner that wastes more than before shows up here."""
    table = PAGE.read_text(encoding="utf-8").partition(f"### {title}\n")[2].partition("###")[0]
    line = f"| {' | '.join(row(name, RULES[title]))} |"
    assert line in table.splitlines(), "python tools/layouts_page.py writes it anew"


@each_row("name", MODELS)
def test_the_shapes_are_those_of_the_model(name: str) -> None:
    """The parameters of the shapes add up to the number that is told of the model, to a hundredth."""
    assert MODELS[name].numel / 1e9 == pytest.approx(TOLD[name], rel=0.01)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_cost_less_than_a_hundredth(name: str, ranks: int) -> None:
    """Padding for blocks of 32 and of 128 is at most 1 %, or the least that shards of equal length allow."""
    for title in ("Blocks of 32", "Blocks of 128"):
        found = cost(MODELS[name], RULES[title], ranks)
        assert found.padding <= max(0.01, found.bound) or math.isclose(found.padding, found.bound)


def test_planning_is_measured() -> None:
    """The tool's figure for the time of planning is of real plans: it is longer than nothing."""
    assert seconds_to_plan("Llama-3-70B", RULES["Rows"], 64) > 0
