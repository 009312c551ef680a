"""A tokenizer of bytes, with a chat template and the tokens that it writes."""

import tokenizers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer_for(template: str, end: str, *others: str, pad="<pad>", **more):
    """`end` ends a turn; `others` are written as well."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: i for i, token in enumerate([pad, "<bos>", end, *others, *alphabet])}
    bytewise = Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        **{"pad_token": pad, "bos_token": "<bos>", "eos_token": end},
        additional_special_tokens=list(others),
        chat_template=template,
        padding_side="left",
        **more,
    )
