"""Rows with images, and a model that answers from their pixels."""

from grpo_nb.models.engine import Engine, Sample, Sampling
from grpo_nb.rewards.prompts import build_prompt, with_images

COLORS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
FORM = "<reasoning>It is plain to see.</reasoning>\n<answer>{}</answer>"
SYSTEM = "Answer in <reasoning> and <answer>."


def picture(color, size=(40, 30)):
    from PIL import Image

    return Image.new("RGB", size, COLORS[color])


def row_of(number, color=None):
    """A row that shows a color; the question is the same for all."""
    color = color or list(COLORS)[number % len(COLORS)]
    images = [picture(color, (40, 30 + number))]
    prompt = with_images(build_prompt("Which color?", SYSTEM), images)
    return {"prompt": prompt, "question": "Which color?", "answer": color, "images": images}


ROWS = [row_of(number) for number in range(16)]


class Looker(Engine):
    """A policy by a script: `answer(image, number)` is what it says to a prompt."""

    name = "scripted"

    def __init__(self, answer):
        super().__init__(None)
        self.answer, self.asked = answer, []

    def generate(self, prompts, **sampling):
        options = Sampling(**sampling)
        self.asked += prompts
        return [
            [self.sample(prompt, number) for number in range(options.num_generations)]
            for prompt in prompts
        ]

    def sample(self, prompt, number):
        [image] = [part["image"] for part in prompt[-1]["content"] if part["type"] == "image"]
        return Sample(FORM.format(self.answer(image, number)), 12, False)

    def complete(self, ids, sampling):
        raise AssertionError("a prompt with images is not token ids alone")

    def close(self):
        pass


def seen(image, _=0):
    """The color's name, read from a pixel."""
    pixel = image.getpixel((3, 3))
    return next((name for name, color in COLORS.items() if color == pixel), "grey")


def half_seen(image, number):
    """It looks every other time, and else says something."""
    return seen(image) if number % 2 else "red"
