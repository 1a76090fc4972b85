"""Given responses: the resource of the `demonstrate` stage (supervised fine-tuning) and of `prefer` (pairs)."""

from __future__ import annotations

import numpy as np

from docklands.core.batch import Batch, Jagged
from docklands.core.fields import LOSS_MASK, PROMPT, PROMPT_ID, PROMPT_TOKENS, SAMPLE_INDEX, TOKEN_IDS
from docklands.data.rows import render_response
from docklands.data.tokenizer import Tokenizer
from docklands.errors import DataError


class Demonstrator:
    """Appends each row's demonstrated response; its model turns, closed by end-of-sequence, train.

    max_response_tokens  a longer response is a DataError: cutting it would teach an answer without its end
    """

    def __init__(self, tokenizer: Tokenizer, max_response_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._most = max_response_tokens

    def demonstrate(self, batch: Batch) -> Batch:
        """PROMPT_TOKENS, PROMPT -> TOKEN_IDS, LOSS_MASK: the row's 'response'."""
        return self._write(batch, ["response"] * len(batch))

    def prefer(self, batch: Batch) -> Batch:
        """PROMPT_TOKENS, PROMPT, SAMPLE_INDEX -> TOKEN_IDS, LOSS_MASK: sample 0 is the row's 'chosen' response, sample
        1 its 'rejected' one.
        """
        return self._write(batch, [("chosen", "rejected")[k] for k in batch[SAMPLE_INDEX].tolist()])

    def _write(self, batch: Batch, keys: list[str]) -> Batch:
        prompts: Jagged = batch[PROMPT_TOKENS]
        tokens, masks = [], []
        for i, row in enumerate(batch[PROMPT]):
            where = f"prompt {int(batch[PROMPT_ID][i])}"
            response, trained = render_response(row, self._tokenizer, where, keys[i])
            if len(response) > self._most:
                raise DataError(
                    f"{where}: the response has {len(response)} tokens, the limit is {self._most}",
                    "raise rollout.max_response_tokens",
                )
            prompt = prompts[i].numpy()
            tokens.append(np.concatenate([prompt, np.asarray(response, np.int32)]))
            masks.append(np.concatenate([np.zeros(len(prompt), bool), np.asarray(trained, bool)]))
        return Batch(batch.row_ids, {TOKEN_IDS: tokens, LOSS_MASK: masks})
