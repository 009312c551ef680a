"""Out of memory in the middle of a training: fewer rows at a time, the same step."""

from typing import Any

from grpo_nb.training import ranks

# How TRL's losses join rows: by the mean over rows, by the mean over tokens, or as a sum
# that is divided by the tokens of the whole step.
MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
MEAN_OF_TOKENS = ("bnpo",)


class Halving:
    """Of a GRPOTrainer: a pass that does not fit runs again in halves; the gradient is the same.

    `rows_at_once` is how many rows of a pass go through the model together; it stays halved
    for the rest of the training. The completions of the step are not generated again.
    Not with several processes: the others would wait in vain for the halves of one.
    """

    rows_at_once: int = 0  # 0: all
    _prepared: tuple[int, Any] | None = None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self._prepared is None or self._prepared[0] != self._step:
            self._prepared = (self._step, super()._prepare_inputs(generation_batch))  # type: ignore[misc]
        return self._prepared[1]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if ranks.count() > 1:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            self._prepared = None
            return loss
        trained = [p for p in model.parameters() if p.requires_grad]
        before = [None if p.grad is None else p.grad.clone() for p in trained]
        while True:
            try:
                loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error).partition("\n")[0]
            else:
                self._prepared = None
                return loss
            # Outside the except clause, for its traceback holds the tensors that are in the way.
            for parameter, gradient in zip(trained, before, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            self._halve(problem)

    def _halve(self, problem: str) -> None:
        import gc

        import torch

        rows = self.rows_at_once or self.args.per_device_train_batch_size
        if rows == 1:
            raise MemoryError(
                f"out of memory with one completion at a time ({problem}): lower "
                "train.max_completion_length or model.max_seq_length, take a smaller "
                "model.model_path, or on a GPU lower policy.gpu_memory_utilization"
            )
        self.rows_at_once = rows // 2
        gc.collect()
        torch.cuda.empty_cache()
        self._metrics["train"]["rows_at_once"].append(self.rows_at_once)
        print(
            f"step {self.state.global_step + 1}: out of memory with {rows} completions in a pass; "
            f"it goes on with {self.rows_at_once} at a time, the gradient stays the same "
            f"({problem})"
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        rows = len(inputs["completion_ids"])
        size = min(self.rows_at_once or rows, rows)
        parts = [_rows_of(inputs, start, start + size) for start in range(0, rows, size)]
        done = 0.0
        for number, part in enumerate(parts):
            loss = super().compute_loss(model, part, return_outputs, num_items_in_batch)  # type: ignore[misc]
            loss = loss * self._share(part, inputs)
            if number == len(parts) - 1:  # transformers runs the backward of what is returned
                return loss + done
            self.accelerator.backward(loss / self._divisor(num_items_in_batch))
            done = done + loss.detach()
        return done

    def _divisor(self, num_items_in_batch: Any) -> int:
        """What transformers' training_step divides the loss by before its backward."""
        own = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return 1 if own or self.compute_loss_func else self.current_gradient_accumulation_steps

    def _share(self, part: dict[str, Any], whole: dict[str, Any]) -> float:
        """The weight of a part's loss in that of the whole pass."""
        if self.args.loss_type in MEAN_OF_ROWS:
            return len(part["completion_ids"]) / len(whole["completion_ids"])
        if self.args.loss_type in MEAN_OF_TOKENS:
            tokens = [(one["completion_mask"].sum()).clamp(min=1).item() for one in (part, whole)]
            return tokens[0] / tokens[1]
        return 1.0


def _rows_of(inputs: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Some rows of a pass; what is of the pass as a whole stays."""
    rows = len(inputs["completion_ids"])

    def cut(value: Any) -> Any:
        of_rows = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 and len(value) == rows
        return value[start:end] if of_rows else value

    return {name: cut(value) for name, value in inputs.items()}


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)
