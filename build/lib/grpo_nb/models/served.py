"""Sample from a model behind an OpenAI-compatible API, such as vLLM's server."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from grpo_nb.models.engine import Engine, Sample, Sampling
from grpo_nb.rewards.prompts import Message, images_of

REQUESTS = 8  # sent at a time
TIMEOUT_SECONDS = 120.0  # for one request; the client retries after a broken connection or a 429


class ServedEngine(Engine):
    """Sample completions of chats through an API.

    Args:
        address: The API's address, such as http://127.0.0.1:8000/v1.
        model: The model's name on the server; "" for the first model that the server lists.
        api_key_env: The environment variable that contains the API key; the key is never stored.
        chat_template_kwargs: Arguments for the chat template, which vLLM's server accepts.

    Raises:
        RuntimeError: The API cannot be reached, refuses the key, or does not serve the model.
    """

    name = "served"

    def __init__(
        self,
        address: str,
        model: str,
        api_key_env: str,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from openai import APIError, OpenAI

        self.address, self.api_key_env = address, api_key_env
        key = os.environ.get(api_key_env) or "none"  # a local server needs no key
        self.client = OpenAI(base_url=address, api_key=key, timeout=TIMEOUT_SECONDS)
        self.body = {"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else None
        try:
            self.model = model or self.client.models.list().data[0].id
        except (APIError, IndexError) as error:
            self._explain(error)

    def generate(self, prompts: Sequence[list[Message]], **sampling: Any) -> list[list[Sample]]:
        """Return completions for each prompt, [prompts][num_generations]."""
        if any(map(images_of, prompts)):
            raise ValueError(f"{self.address} cannot get images: name a rescue.teacher to load")
        options, samples = Sampling(**sampling), []
        numbers = range(options.num_generations)
        requests = [(prompt, options.seed + number) for prompt in prompts for number in numbers]
        with ThreadPoolExecutor(REQUESTS) as pool:
            for sample in pool.map(lambda request: self._ask(*request, options), requests):
                samples.append(sample)
                if options.progress:
                    options.progress(len(samples), len(requests), self.address)
        group = options.num_generations
        return [samples[start : start + group] for start in range(0, len(samples), group)]

    def complete(self, ids: Sequence[Sequence[int]], sampling: Sampling) -> NoReturn:
        """Raise RuntimeError, because the server takes chats and renders them itself."""
        raise RuntimeError(f"the model at {self.address} takes chat messages, not token ids")

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _ask(self, prompt: list[Message], seed: int, options: Sampling) -> Sample:
        from openai import APIError

        try:
            reply = self.client.chat.completions.create(
                model=self.model,
                messages=prompt,
                temperature=options.temperature,
                max_tokens=options.max_completion_length,
                seed=seed,
                extra_body=self.body,
            )
            choice, tokens = reply.choices[0], reply.usage and reply.usage.completion_tokens
            # A refusal has no content; it becomes an empty completion, which is never right.
            return Sample(
                choice.message.content or "", tokens or 0, choice.finish_reason == "length"
            )
        except (APIError, AttributeError, ValueError, TypeError) as error:
            self._explain(error)

    def _explain(self, error: Exception) -> NoReturn:
        """Raise a RuntimeError that explains the error and names the address."""
        raise RuntimeError(
            f"the model at {self.address} gives no answer ({type(error).__name__}: {error}). "
            "Check that its server runs, the address, the model's name, and the key in the "
            f"environment variable {self.api_key_env}; answers received so far are kept"
        ) from None
