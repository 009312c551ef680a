"""Our rewards inside a real GRPO run, and other people's rewards inside our harness."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from pages import blocks
from trainings import trainer_of

from grpo_nb import data, reward_lab, stages
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import Sample, hub, template
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import Adaptive, load_preset, load_rewards, reward_set
from grpo_nb.rewards.contract import TRLS_OWN
from grpo_nb.rewards.load import load_python
from grpo_nb.rewards.sets import built_in
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve


async def patient_judge(completions, **_):
    return [0.5] * len(completions)


TRLS = """from trl.rewards import (
    accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward,
    get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward,
)

cosine = get_cosine_scaled_reward(48)
repetition = get_repetition_penalty_reward(2)
overlong = get_soft_overlong_punishment(48, 24)
reward_funcs = [accuracy_reward, reasoning_accuracy_reward, think_format_reward]
reward_funcs += [cosine, repetition, overlong]
"""
(EXAMPLE,) = [
    block.text
    for block in blocks(PROJECT_ROOT / "docs/coming-from.md", "python")
    if block.text.startswith("# rewards.py")
]
FOREIGN = {"trl": TRLS, "docs/coming-from.md": EXAMPLE}
# As public notebooks have them: tags that are counted, marks, an async one, a list with weights.
for name in ("dev/sound/small_tag_counts", "dev/sound/format_and_answer",
             "held_out/sound/async_signs", "held_out/sound/three_with_weights"):  # fmt: skip
    path = PROJECT_ROOT / f"benchmarks/reward_files/{name}.py"
    FOREIGN[path.stem] = path.read_text(encoding="utf-8")
OURS = [func for func in built_in().values() if set(func.columns) <= {"answer"}]
OURS = [func for func in OURS if func.__name__ != "json_fields_reward"]  # its expected are JSON
CORRECT = {"correctness_reward_func", "check_answer", "solved", "right_name", "accuracy_reward"}
CORRECT |= {"numeric_correctness_reward", "cosine_scaled_reward"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Steps of a real trainer with all of them: what TRL called a reward with, and the scores."""
    folder, calls = tmp_path_factory.mktemp("foreign"), []

    def spy(**given):
        calls.append(given)
        return [0.0] * len(given["completions"])

    sets = [load_python(folder / f"{Path(name).stem}.py", text) for name, text in FOREIGN.items()]
    adaptive = Adaptive(built_in()["soft_format_reward"].configured("adaptive_format"))
    theirs = [func for one in sets for func in one.reward_funcs]
    funcs = {func.__name__: func for func in (spy, *theirs, *OURS, adaptive, patient_judge)}
    changes = {"grpo.max_steps": 2, "grpo.per_device_train_batch_size": 16, "train.eval_steps": 0}
    config = resolve("tiny-cpu", changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(folder))
        tokenizer, run = hub.load_tokenizer(config.model.model_name), Run("foreign")
        data.prepare_run(run, config.data, 0, partial(template.count_tokens, tokenizer))
        rows = [row | {"solution": f"${row['answer']}$"} for row in data.load(run, "train")[:32]]
        run.write_config(config)
        chosen = reward_set([(func, 1.0) for func in funcs.values()])
        trainer_of(run, chosen=chosen, rows=rows).train()
    table = pd.read_parquet(min((folder / "foreign/train/completions").glob("*.parquet")))
    bench = reward_lab.Bench(load_preset("math"), config.grpo, tokenizer)
    return SimpleNamespace(called=calls[0], bench=bench, rows=rows, config=config, table=table)


def test_a_reward_outside_a_training_is_called_as_trl_calls_it(trained):
    called = trained.called
    texts = [completion[0]["content"] for completion in called["completions"]]
    columns = [key for key in called if key not in TRLS_OWN]
    values = zip(called["prompts"], *map(called.get, columns), strict=True)
    rows = [dict(zip(("prompt", *columns), of_row, strict=True)) for of_row in values]
    given = trained.bench.arguments(rows, texts)
    assert given.keys() == called.keys()
    for key, values in called.items():
        if isinstance(values, list):
            assert given[key] == values, key
    state = given["trainer_state"]
    assert vars(state).keys() >= vars(called["trainer_state"]).keys()
    assert (state.max_steps, state.global_step) == (called["trainer_state"].max_steps, 0)
    given["log_extra"](column="why", values=[""])
    given["log_metric"](name="share", value=1.0)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_rewards_earn_in_notebook_2_what_they_earn_in_training(name, trained, runs_dir):
    """Adopted from a cell, scored and judged as there, and loaded as notebook 3 loads them."""
    groups = [group for _, group in trained.table.groupby(trained.called["question"], sort=False)]
    texts_P_G = [[one[0]["content"] for one in group["completion"]] for group in groups]
    by_question = dict.fromkeys(trained.called["question"])  # these come first
    by_question |= {row["question"]: row for row in trained.rows}
    train_rows = list(by_question.values())
    rows = train_rows[: len(groups)]
    samples = [[Sample(text, len(text), False) for text in texts] for texts in texts_P_G]
    tried, stage = Baseline(rows, samples), Stage(Run("own"), "02", trained.config)
    test = reward_lab.RewardTest(stage, train_rows, tried, trained.bench)
    test = stages.adopt(test, FOREIGN[name])
    ours = test.bench
    scores = ours.table(rows, texts_P_G)[ours.preset.names].to_numpy()
    earned = pd.concat(groups)[ours.preset.names].to_numpy(float)
    np.testing.assert_allclose(scores, earned, atol=1e-6)
    assert ours.preset.correct_func.__name__ in CORRECT
    verdict = reward_lab.judge(test)
    assert verdict.probes is not None, verdict
    assert verdict.passed or name not in ("small_tag_counts", "docs/coming-from.md"), verdict
    reward_lab.save(test, verdict)
    loaded = load_rewards(stage.config.rewards)
    sentence = reward_lab.refuse_untested(stage.run, loaded, force=True)
    assert "the rewards " in sentence.partition("not those")[0]
    again = test.using(loaded).table()[loaded.names].to_numpy()
    np.testing.assert_array_equal(again, scores)
