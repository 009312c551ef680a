"""Stand-in rows for the data sets that public GRPO sources load: benchmarks/public_rewards.py.

Questions, workings and answers are those of GSM8K, written in each data set's own columns and form.
So the rows are real for GSM8K alone: elsewhere a reward meets the form that its author wrote it
for, but not the content. A source that asks for a data set without an entry here is told so.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROWS = 128


def problems(gsm8k: Path, count: int = ROWS) -> list[Row]:
    """Return GSM8K's first rows, with the working and the final answer apart."""
    with gsm8k.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    for row in rows:
        working, _, final = row["answer"].rpartition("#### ")
        plain = re.sub(r"<<.*?>>|\$", "", working).strip()  # as LaTeX, a $ would begin a formula
        row |= {"working": plain, "final": final.strip().replace(",", "")}
    return rows


def user(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def image(number: int) -> Any:
    """Return a picture in one colour that no other row has."""
    from PIL import Image

    return Image.new("RGB", (64, 64), (number * 5 % 256, number * 11 % 256, 90))


def _gsm8k(row: Row, _: int) -> Row:
    return {"question": row["question"], "answer": row["answer"]}


def _open_math(row: Row, _: int) -> Row:
    return {
        "expected_answer": row["final"],
        "problem_type": "has_answer_extracted",
        "problem_source": "aops_c4_high_school_math",
        "generation_model": "DeepSeek-R1",
        "pass_rate_72b_tir": "0.5",
        "problem": row["question"],
        "generated_solution": f"<think>{row['working']}</think>The answer is "
        rf"\boxed{{{row['final']}}}.",
        "inference_mode": "cot",
    }


def _dapo(row: Row, number: int) -> Row:
    asked = f"Solve the following math problem step by step.\n\n{row['question']}"
    return {
        "prompt": row["question"],
        "solution": row["final"],
        "data_source": "math_dapo",
        "source_prompt": user(asked),
        "ability": "MATH",
        "reward_model": {"ground_truth": row["final"], "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(number)},
    }


def _boxed(row: Row, _: int) -> Row:
    """NuminaMath and OpenR1-Math: a worked solution with a box."""
    solution = rf"{row['working']} The answer is \(\boxed{{{row['final']}}}\)."
    messages = [*user(row["question"]), {"role": "assistant", "content": solution}]
    return {"problem": row["question"], "solution": solution, "messages": messages}


def _open_r1(row: Row, number: int) -> Row:
    return _boxed(row, number) | {"answer": row["final"], "problem_type": "Algebra"}


def _verified(row: Row, number: int) -> Row:
    return _open_r1(row, number) | {"prompt": user(row["question"])}


def _deep_scaler(row: Row, _: int) -> Row:
    return {"problem": row["question"], "answer": row["final"], "solution": row["working"]}


def _deep_math(row: Row, _: int) -> Row:
    return {"prompt": user(row["question"]), "solution": f"${row['final']}$"}


def _tldr(row: Row, _: int) -> Row:
    post = f"SUBREDDIT: r/learnmath\n\nTITLE: A problem\n\nPOST: {row['question']}\n\nTL;DR:"
    return {"prompt": post, "completion": f" {row['working'].splitlines()[-1]}"}


def _prompts(row: Row, _: int) -> Row:
    return {"prompt": user(row["question"])}


def _zen(row: Row, _: int) -> Row:
    return {"prompt": row["question"]}


def _chosen(row: Row, _: int) -> Row:
    said = [[{"role": "assistant", "content": row[key]}] for key in ("working", "final")]
    return {"prompt": user(row["question"]), "chosen": said[0], "rejected": said[1]}


def _threads(row: Row, number: int) -> Row:
    return {"messages": _boxed(row, number)["messages"]}


def _open_thoughts(row: Row, _: int) -> Row:
    said = [
        {"from": "user", "value": row["question"]},
        {"from": "assistant", "value": row["final"]},
    ]
    return {"system": "Think first.", "conversations": said}


def _support(row: Row, _: int) -> Row:
    return {
        "flags": "B",
        "instruction": row["question"],
        "category": "ORDER",
        "intent": "cancel_order",
        "response": row["working"],
    }


def _math_vista(row: Row, number: int) -> Row:
    return {
        "pid": str(number),
        "question": row["question"],
        "image": f"images/{number}.jpg",
        "decoded_image": image(number),
        "choices": None,
        "unit": None,
        "precision": 1.0,
        "answer": row["final"],
        "question_type": "free_form",
        "answer_type": "integer",
        "metadata": {"category": "math-targeted-vqa", "language": "english"},
        "query": f"Hint: Please answer the question.\nQuestion: {row['question']}",
    }


def _multimodal(row: Row, number: int) -> Row:
    return {
        "image": image(number),
        "problem": row["question"],
        "solution": f"<think>{row['working']}</think>\n\n<answer>{row['final']}</answer>",
        "original_question": row["question"],
        "original_answer": row["final"],
    }


def _coding(row: Row, number: int) -> Row:
    """A program that prints a sum, with its tests."""
    cases = [
        {"input": f"{a} {number}\n", "output": f"{a + number}\n", "type": "stdin_stdout"}
        for a in (1, 20, 300)
    ]
    return {
        "source": "apps",
        "problem_id": f"vfc_{number}",
        "problem_statement": "Read two integers on one line and print their sum.",
        "gold_standard_solution": "print(sum(map(int, input().split())))",
        "verification_info": {"language": "python", "test_cases": cases},
    }


def _biogrid(row: Row, number: int) -> Row:
    names = ("Alt ids interactor A", "Alt ids interactor B")
    return dict.fromkeys(names, f"biogrid:{number}|entrez gene/locuslink:GENE{number}")


def _biogrid_questions(row: Row, number: int) -> Row:
    asked = f"Does the gene GENE{number} interact with GENE{number + number % 2}?"
    return {"question": asked, "answer": ("Yes", "No")[number % 2]}


# The end of a data set's name → its rows.
FORMS: dict[str, Callable[[Row, int], Row]] = {
    "gsm8k": _gsm8k,
    "OpenMathReasoning-mini": _open_math,
    "DAPO-Math-17k-Processed": _dapo,
    "NuminaMath-TIR": _boxed,
    "OpenR1-Math-220k": _open_r1,
    "OpenR1-Math-220k-default-verified": _verified,
    "DeepScaleR-Preview-Dataset": _deep_scaler,
    "DeepMath-103K": _deep_math,
    "tldr": _tldr,
    "ultrafeedback-prompt": _prompts,
    "ultrafeedback_binarized": _chosen,
    "Capybara": _threads,
    "OpenThoughts-114k": _open_thoughts,
    "Bitext-customer-support-llm-chatbot-training-dataset": _support,
    "MathVista": _math_vista,
    "multimodal-open-r1-8k-verified": _multimodal,
    "verifiable-coding-problems-python": _coding,
    "verifiable-coding-problems-python_decontaminated-tested-shuffled": _coding,
    "zen": _zen,
    "biogrid": _biogrid,
    "biogrid_qa": _biogrid_questions,
}


def loader(gsm8k: Path) -> Callable[..., Any]:
    """Return what stands in for `datasets.load_dataset`."""
    import datasets

    def load_dataset(path: str, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        form = FORMS.get(str(path).rsplit("/", 1)[-1])
        if form is None:
            raise LookupError(f"no stand-in rows for the data set {path}")
        rows: Iterable[Row] = (form(row, n) for n, row in enumerate(problems(gsm8k)))
        table = datasets.Dataset.from_list(list(rows))
        if split is None:
            return datasets.DatasetDict(train=table, test=table)
        return [table for _ in split] if isinstance(split, (list, tuple)) else table

    return load_dataset
