"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer.json: byte-level BPE, or SentencePiece-style BPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docklands.errors import DataError

# Token types of the format: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"

# How text is cut before merging, by the file's `tokenizer.ggml.pre`. The patterns are those of the tokenizers named.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {"smollm": "digits", "default": "gpt2", "gpt-2": "gpt2", "llama-bpe": LLAMA3, "llama3": LLAMA3}


def tokenizer_json(metadata: Mapping[str, Any], where: str) -> str:
    """tokenizer.json for `tokenizer.ggml.*` metadata. DataError for a kind of tokenizer that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise DataError(f"{where}: the file has no tokenizer", "a GGUF with tokenizer.ggml.tokens is needed")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, where)
    else:
        raise DataError(f"{where}: tokenizer model {kind!r} is not supported", "supported: gpt2, llama")
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [tokens[i] for i, type_ in enumerate(types) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    user = [tokens[i] for i, type_ in enumerate(types) if type_ == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])
    return tokenizer.to_str(pretty=True)


def _byte_level(metadata: Mapping[str, Any], where: str) -> Any:
    """GPT-2 style: bytes mapped to printable characters, merges in order of rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    rule = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre", "default")))
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise DataError(f"{where}: pre-tokenizer {metadata['tokenizer.ggml.pre']!r} is not known", f"known: {known}")
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_pair(merge, where) for merge in metadata.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == LLAMA3))
    parts: list[Any]
    if rule == "gpt2":
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif rule == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        parts = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise DataError(f"{where}: merge {merge!r} is not a pair")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], where: str) -> Any:
    """SentencePiece BPE: no merge list in the file; a pair may merge when its sum is a token, best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise DataError(f"{where}: a SentencePiece tokenizer needs one score per token")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, i in vocabulary.items():
        if types[i] != 1:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, token[:cut], token[cut:]))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (  # type: ignore[assignment]
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens, chat template, length limit."""
    tokens = metadata["tokenizer.ggml.tokens"]
    arch = metadata["general.architecture"]
    # The generic class: named ones rebuild their own pre-tokenizer instead of reading tokenizer.json.
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata[f"{arch}.context_length"]),
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for key, name in names.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[name] = tokens[int(token)]
    config.setdefault("pad_token", config.get("eos_token"))
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
