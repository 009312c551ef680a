"""What the optimizer makes of rewards, against TRL's own trainer."""

import numpy as np
import pytest
from hackable import lifted
from trainings import trainer_of

from grpo_nb.reward_lab.table import advantages, effective_scaling
from grpo_nb.rewards import reward_set
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run

GROUP, GROUPS, WEIGHTS = 4, 6, [1.0, 0.25, -0.5]
ROWS = [{"prompt": build_prompt("What is 1 + 1?")}]
SCALES, HOW = ("group", "batch", "none"), ("sum_then_normalize", "normalize_then_sum")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def prepared_scores(seed):
    """[completions, rewards] of floats, None and NaN, with every case that has its own path."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(GROUP * GROUPS, len(WEIGHTS))).astype(object)
    scores[random.random(scores.shape) < 0.2] = None
    scores[random.random(scores.shape) < 0.1] = np.nan
    scores[[1, 4, 5, 6, 7]] = None  # no reward scored this completion, nor any of this group
    scores[8:12] = 0.5  # all tie
    scores[12:16, 1] = None  # one reward, in a whole group
    scores[16:20] = [[None] * 3, [1.0] * 3, [None] * 3, [None] * 3]  # one known value
    return scores


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """TRL's, as notebook 3 builds it, with generation cut after two tokens."""
    settings = {"grpo.per_device_train_batch_size": GROUP, "grpo.num_generations": GROUP}
    settings |= {"grpo.max_completion_length": 2, "train.eval_steps": 0}
    columns = (lambda completions, scores, i=i, **_: [row[i] for row in scores] for i in range(3))
    preset = reward_set([*zip(map(lifted, columns, "abc"), WEIGHTS, strict=True)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        built = trainer_of(Run("advantages"), chosen=preset, rows=ROWS, **settings)
    built.model.train()
    return built


EACH_SCALING = [(i, scale, how, "dapo") for i in (0, 1) for scale in SCALES for how in HOW]
EACH_LOSS = [(2, "group", HOW[0], loss) for loss in LOSSES]


@pytest.mark.parametrize(("seed", "scale", "how", "loss"), EACH_SCALING + EACH_LOSS)
def test_advantages_are_those_of_trls_trainer(trainer, seed, scale, how, loss):
    scores = prepared_scores(seed)
    chosen = {"scale_rewards": scale, "multi_objective_aggregation": how, "loss_type": loss}
    assert chosen.keys() <= vars(trainer).keys()
    vars(trainer).update(chosen)
    inputs = [{**ROWS[0], "scores": row} for row in scores.tolist()]
    theirs = trainer._generate_and_score_completions(inputs)["advantages"].numpy()
    effective = effective_scaling(scale, loss, unsloth_on_gpu=False)
    ours = advantages(scores.astype(float), WEIGHTS, GROUP, effective, how)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_groups_have_to_fit_and_unsloth_on_a_gpu_does_not_scale_under_dr_grpo():
    with pytest.raises(ValueError, match="4 completions do not make groups of 3"):
        advantages(np.zeros((4, 1)), [1.0], 3)
    assert effective_scaling("group", "dr_grpo", unsloth_on_gpu=True) == "none"
