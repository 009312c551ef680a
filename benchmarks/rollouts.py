"""Is learning from the dense copy's samples the same as from the policy's own?

    python benchmarks/rollouts.py            # 3 seeds, both ways; about six minutes

First the learning curves (mean reward of 10 steps each); then, after 10 steps on the copy's
samples, how far the two are apart on sampled tokens. What bf16 rounding does by itself is the
policy against itself with one more column of padding.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import contextlib
import io
import statistics
import tempfile

STEPS, SEEDS, WINDOW = 60, 3, 10


def curve(rows, chosen, seed: int, rollouts: str, folder: str, steps: int = STEPS):
    """Mean reward of each ten steps, and the trainer."""
    from grpo_nb import models, stages
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import resolve

    settings = {
        "train.eval_steps": 0,
        "policy.rollouts": rollouts,
        "grpo.max_steps": steps,
        "seed": seed,
    }
    config = resolve("tiny-cpu", settings)
    policy = models.load_policy(config)
    stage = Stage(Run(f"{rollouts}-{seed}-{steps}"), "03", config)
    trainer = stages.build_trainer(policy, chosen, rows, stage)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    windows = [rewards[start : start + WINDOW] for start in range(0, steps, WINDOW)]
    return [statistics.mean(window) for window in windows], trainer


def apart(trainer) -> None:
    """Print the differences of log-probabilities on the tokens of one batch."""
    import torch

    batch = next(iter(trainer.get_train_dataloader()))
    trainer.share_prompts = False
    one = trainer._generate_and_score_completions(batch)
    ids = torch.cat([one["prompt_ids"], one["completion_ids"]], dim=1)
    mask = torch.cat([one["prompt_mask"], one["completion_mask"]], dim=1)
    width, kept = one["completion_ids"].shape[1], one["completion_mask"].bool()

    def log_p(*pair):
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(trainer.model, *pair, width)[0]

    policy = log_p(ids, mask)
    wider = log_p(*(torch.nn.functional.pad(x, (1, 0)) for x in (ids, mask)))
    copied = torch.zeros_like(policy)
    with torch.no_grad():
        copy = trainer._dense.renew()
        for row, (tokens, seen) in enumerate(zip(ids, mask.bool(), strict=True)):
            tokens, count = tokens[seen], int(kept[row].sum())
            every = copy(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            copied[row, :count] = every.gather(-1, tokens[1:, None])[-count:, 0]
    print("| on sampled tokens | mean | over 0.02 | over 0.1 | over 0.3 |\n|---|---|---|---|---|")
    pairs = {"copy": copied, "policy, other padding": wider}
    for name, other in pairs.items():
        differences = (other - policy)[kept].abs()
        shares = [(differences > limit).float().mean().item() for limit in (0.02, 0.1, 0.3)]
        print(f"| {name} | {differences.mean():.4f} | {' | '.join(f'{x:.2%}' for x in shares)} |")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        from grpo_nb import data, rewards
        from grpo_nb.runs import Run
        from grpo_nb.runs.config import resolve

        config, run = resolve("tiny-cpu"), Run("benchmark")
        data.prepare_run(run, config.data, 0, lambda chats: [30] * len(chats))
        rows, chosen = data.load(run, "train"), rewards.load_preset("math")
        for seed in range(SEEDS):
            for rollouts in ("model", "auto"):
                means, _ = curve(rows, chosen, seed, rollouts, folder)
                text = " ".join(f"{mean:.2f}" for mean in means)
                print(f"seed {seed} {rollouts:5}: {text}", flush=True)
        apart(curve(rows, chosen, 0, "auto", folder, WINDOW)[1])


if __name__ == "__main__":
    main()
