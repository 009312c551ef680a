"""Whether all that loads a tokenizer cuts texts alike, for the tests of the bases."""

from tokenizers import Tokenizer

from grpo_nb.models import chat
from grpo_nb.models.policy import import_unsloth


def assert_read_alike(folder, pairs):
    """Each (prompt, completion) has one reading, whatever loads the tokenizer.

    AutoTokenizer is what TRL and vLLM call too; it builds the model type's own pre-tokenizer.
    """
    auto = chat.load_tokenizer(str(folder))
    texts = [chat.render(auto, prompt) + completion for prompt, completion in pairs]
    assert auto(texts)["input_ids"] == [
        auto(chat.render(auto, prompt))["input_ids"] + auto(completion)["input_ids"]
        for prompt, completion in pairs
    ], "also where the training put prompt and completion together"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [encoding.ids for encoding in plain.encode_batch(texts)] == auto(texts)["input_ids"]
    with chat.quiet():
        _, unsloth = import_unsloth().from_pretrained(str(folder), max_seq_length=128)
    assert unsloth(texts)["input_ids"] == auto(texts)["input_ids"]
