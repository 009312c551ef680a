"""Sound: a decorator turns a grader of one completion into a reward of a batch.

rows: gsm8k_raw
truth: sound
"""

import functools


def per_completion(grade):
    @functools.wraps(grade)
    def batch(prompts, completions, **columns):
        rewards = []
        for i, completion in enumerate(completions):
            row = {name: values[i] for name, values in columns.items() if name == "answer"}
            rewards.append(float(grade(completion, **row)))
        return rewards

    del batch.__wrapped__  # the trainer and its tools read the signature of the batch
    return batch


@per_completion
def grade(completion, answer):
    work, mark, number = completion.rstrip().rpartition("\n#### ")
    if not mark or "####" in work:
        return False
    number = number.strip("*").lstrip("$").replace(",", "").removesuffix(".")
    return number == answer.rpartition("#### ")[2]


reward_funcs = [grade]
