"""Sound: a wrong letter costs a third, "?" costs nothing, as in exams with negative marking.

rows: choice
truth: sound
"""


class NegativeMarking:
    """+1, -1/3 or 0."""

    options = 4

    def __init__(self):
        self.__name__ = type(self).__name__.lower()

    def mark(self, text, key):
        head, tag, tail = text.partition("<answer>")
        given = tail.removesuffix("\n").removesuffix("</answer>").strip().upper()
        if given == key and tag and "</reasoning>" in head:
            return 1.0
        return 0.0 if given in ("", "?") else -1 / (self.options - 1)

    def __call__(self, completions, answer, **kwargs):
        return list(map(self.mark, completions, answer))


reward_funcs = [NegativeMarking()]
