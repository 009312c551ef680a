"""Write data/tasks/charts.jsonl and data/tasks/charts/: 450 questions on small bar charts.

    python data/make_charts.py

A row; its image is 96 x 96 pixels, its bars are 1 to 5 grid lines high:

    {"question": "How many bars are higher than the red line?", "answer": "3",
     "image": "charts/000.png", "heights": [3, 5, 2, 4, 1], "line": 2}

`line` is the grid line below the red line, which runs halfway to the next. Every kind of question
has each of the answers 1 to 5 equally often, so that a guess without the image earns 20 %. No
chart stands twice, and make_vision_base.py leaves every one out of its training.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

HERE = Path(__file__).parent
ROWS = 450
SEED = 0
BARS = TOP = 5
CELL = 16  # pixels from bar to bar and from grid line to grid line; also a patch of the model
MARGIN = CELL // 2
SIDE = BARS * CELL + 2 * MARGIN
WHITE, GREY, BLACK, RED, FIRST_COLOUR = range(5)
PALETTE = [
    *[(255, 255, 255), (215, 215, 215), (0, 0, 0), (214, 39, 40)],
    *[(31, 119, 180), (44, 160, 44), (148, 103, 189), (255, 187, 40)],
]
QUESTIONS = {
    "highest": "Which bar is the highest, from the left?",
    "lowest": "Which bar is the lowest, from the left?",
    "count": "How many bars are higher than the red line?",
}


class Chart(NamedTuple):
    heights: tuple[int, ...]
    line: int


class Problem(NamedTuple):
    """Hold a chart and the kind of its question, a name in QUESTIONS."""

    kind: str
    chart: Chart

    @property
    def answer(self) -> int | None:
        """Return the answer, 1 to 5; None if no bar is counted, or several are equally extreme."""
        heights, line = self.chart
        if self.kind == "count":
            return sum(height > line for height in heights) or None
        extreme = max(heights) if self.kind == "highest" else min(heights)
        return heights.index(extreme) + 1 if heights.count(extreme) == 1 else None


def sample_problem(kind: str, answer: int, rng: random.Random) -> Problem:
    """Return a problem of a kind that has this answer."""
    while True:
        heights = tuple(rng.randint(1, TOP) for _ in range(BARS))
        problem = Problem(kind, Chart(heights, rng.randint(1, TOP - 1)))
        if problem.answer == answer:
            return problem


def draw_chart(chart: Chart, rng: random.Random) -> Image.Image:
    """Return the chart as an image with a palette; colour and width of the bars are drawn."""
    image = Image.new("P", (SIDE, SIDE), WHITE)
    image.putpalette([level for colour in PALETTE for level in colour])
    pen = ImageDraw.Draw(image)
    floor = SIDE - MARGIN
    for level in range(1, TOP + 1):
        pen.line([(MARGIN, floor - level * CELL), (SIDE, floor - level * CELL)], fill=GREY)
    colour = rng.randrange(FIRST_COLOUR, len(PALETTE))
    gap = rng.randint(1, 4)
    for number, height in enumerate(chart.heights):
        left = MARGIN + number * CELL
        box = [left + gap, floor - height * CELL, left + CELL - gap, floor]
        pen.rectangle(box, fill=colour)
    pen.line([(MARGIN, MARGIN), (MARGIN, floor), (SIDE, floor)], fill=BLACK)
    middle = floor - chart.line * CELL - CELL // 2
    pen.line([(MARGIN, middle), (SIDE, middle)], fill=RED, width=2)
    return image


def sample_set() -> list[tuple[dict, Image.Image]]:
    """Return the rows of the set and their images."""
    rng = random.Random(SEED)
    goals = [(kind, answer) for kind in QUESTIONS for answer in range(1, TOP + 1)]
    goals *= ROWS // len(goals)
    rng.shuffle(goals)
    problems: dict[Chart, Problem] = {}
    while len(problems) < ROWS:
        problem = sample_problem(*goals[len(problems)], rng)
        problems.setdefault(problem.chart, problem)
    return [
        (
            {
                "question": QUESTIONS[problem.kind],
                "answer": str(problem.answer),
                "image": f"charts/{number:03}.png",
                **problem.chart._asdict(),
            },
            draw_chart(problem.chart, rng),
        )
        for number, problem in enumerate(problems.values())
    ]


def read_charts() -> set[Chart]:
    """Return every chart of the shipped set."""
    lines = (HERE / "tasks/charts.jsonl").read_text(encoding="utf-8").splitlines()
    return {Chart(tuple(row["heights"]), row["line"]) for row in map(json.loads, lines)}


def main() -> None:
    folder = HERE / "tasks"
    (folder / "charts").mkdir(parents=True, exist_ok=True)
    rows = sample_set()
    for row, image in rows:
        image.save(folder / row["image"], optimize=True)
    lines = [json.dumps(row) + "\n" for row, _ in rows]
    (folder / "charts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
